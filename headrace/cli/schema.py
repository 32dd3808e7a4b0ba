"""`headrace schema`: what an editor needs to complete and check run.yaml."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.plain_errors import plainly
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_schema import run_schema


@plainly
def schema(
    output: Annotated[Path | None, typer.Option(help="File to write. Default: print it.")] = None,
) -> None:
    """Print the JSON schema of run.yaml, by which editors complete keys and mark wrong values."""
    text = json.dumps(run_schema(), indent=2)
    if output is None:
        typer.echo(text)
        return
    try:
        output.write_text(text + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"output: {output}: cannot be written ({error.strerror}); name another with --output") from error
    typer.echo(f"wrote {output}; begin run.yaml with `# yaml-language-server: $schema={output}`")
