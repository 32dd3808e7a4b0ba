"""`headrace report`: the page of a run, its figures as JSON, its operations as a trace; `headrace watch`: the page, live.

Invariant: a run directory is only read; the only file that is written by default is its `report.html`.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.plain_errors import plainly


@plainly
def report(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    out: Annotated[Path | None, typer.Option(help="HTML file to write. Default: RUN_DIR/report.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON; a page only with --out.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Also write the last steps as a trace for ui.perfetto.dev.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Also write the lanes of the last step as an SVG picture.")] = None,
) -> None:
    """Write one HTML page about a run: a step's lanes, rates, memory, loss, what limits it, SSD wear. Opens without network."""
    from headrace.apps import read_run, summary, write_picture, write_report, write_trace

    # If so, stdout is only for the figures, the page or the trace.
    taken = as_json or _is_stdout(out) or _is_stdout(trace) or _is_stdout(svg)
    if out is not None or not as_json:
        page = write_report(run_directory, out)
        typer.echo(f"wrote {page}", err=taken)
    if trace is not None:
        typer.echo(f"wrote {write_trace(run_directory, trace)}", err=taken)
    if svg is not None:
        typer.echo(f"wrote {write_picture(run_directory, svg)}", err=taken)
    if as_json:
        import json

        typer.echo(json.dumps(summary(read_run(run_directory)), indent=2))


@plainly
def watch(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    port: Annotated[int, typer.Option(help="Port on this machine's loopback; 0: any that is free.", min=0, max=65535)] = 8765,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show the page of a run while it runs: loss, lanes, memory, what limits it, time left. Ctrl-C ends it, not the run."""
    from headrace.apps import WatchServer

    with WatchServer(run_directory, port) as server:
        typer.echo(f"{run_directory}: {server.address} (Ctrl-C ends it; the run goes on)")
        if browse:
            import webbrowser

            webbrowser.open(server.address)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def _is_stdout(path: Path | None) -> bool:
    """Return whether `path` is where stdout goes, whatever its name."""
    try:
        return path is not None and os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError):  # the path does not exist yet, or stdout is no file of the system's
        return False
