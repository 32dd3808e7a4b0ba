"""`headrace migrate`: another trainer's file becomes `run.yaml`, and what has no counterpart is listed."""

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.plain_errors import plainly
from headrace.terms.errors import ConfigError


@plainly
def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="YAML of axolotl, LLaMA-Factory or TRL; their command in a .sh; JSON of DeepSpeed."
        ),
    ],
    output: Annotated[Path, typer.Option(help="YAML file to write.")] = Path("run.yaml"),
    tool: Annotated[
        str | None, typer.Option("--from", help="axolotl, llama-factory, trl or deepspeed. Default: by the keys.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts, and write nothing.")] = False,
) -> None:
    """Turn another trainer's file into run.yaml, and list every key that has no counterpart, with the reason."""
    from headrace.migrate import migrate as translated

    found = translated(file, tool)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    if output.exists() and not force:
        raise ConfigError(f"output: {output} is there already; name another with --output, or give --force")
    try:
        output.write_text(found.to_yaml(), "utf-8")
    except OSError as error:
        raise ConfigError(f"output: {output}: cannot be written ({error.strerror}); name another with --output") from error
    typer.echo(f"wrote    {output}: {len(found.options)} options from {found.tool}'s {file.name}")
    for note in found.notes:
        typer.echo(f"look at  {note}")
    width = max(map(len, found.left_out), default=0)
    for key, reason in found.left_out.items():
        typer.echo(f"left out {key:{width}}  {reason}")
    typer.echo(f"next     headrace plan {output}; headrace train {output}")
