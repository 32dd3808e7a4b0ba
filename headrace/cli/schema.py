"""`headrace schema`: what an editor needs to complete and check run.yaml.

Invariant: it is made from the declarations, so it has every key, help and limit that `headrace train` has.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.plain_errors import plainly
from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import Declaration
from headrace.terms.options.option_kinds import Schema
from headrace.terms.options.run_options import NodeOptions


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


def run_schema() -> Schema:
    """Return the schema (draft 7, which editors read best). A node's file has more keys, which a run's may not use."""
    declared = NodeOptions.declarations()
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "run.yaml of headrace",
        "type": "object",
        "properties": {each.key: _property(each) for each in declared},
        "required": [each.key for each in declared if each.required],
        "additionalProperties": False,
    }


def _property(declaration: Declaration) -> Schema:
    said, found = {"description": declaration.command_help}, declaration.kind.schema()
    return {**said, "anyOf": [found, {"type": "null"}]} if declaration.optional else {**said, **found}
