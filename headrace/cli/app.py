"""The commands of `headrace`. Each declares its arguments and hands over; the work is elsewhere.

Invariant: nothing heavy is imported before a command runs, so that `headrace --help` answers at once.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import headrace
from headrace.cli.first_look import (
    look_at_choices,
    look_at_configuration,
    look_at_data,
    look_at_model,
    look_at_place,
    look_at_plan_names,
    look_at_words,
    model_here,
    with_model_here,
)
from headrace.cli.migrating import migrate
from headrace.cli.plain_errors import INTERRUPTED, leave, plain_usage_errors, plainly
from headrace.cli.reporting import report, watch
from headrace.cli.schema import schema
from headrace.cli.sections import (
    CLUSTER,
    PLAN,
    SETTINGS,
    SHRINK,
    TIDY,
    TRAIN,
    USE,
    SectionedCommand,
    SectionedGroup,
    asked_of,
    with_options,
)
from headrace.cli.streams import guarded_streams
from headrace.codec.table import written_codes
from headrace.process import launched, set_process_defaults
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.declared import Declaration, Group
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.run_options import NodeOptions, RunOptions
from headrace.terms.options.serve_options import ServeOptions

app = typer.Typer(
    name="headrace",
    help="Fine-tune, compress and run language models that are larger than memory, on GPU, CPU and NVMe together.",
    cls=SectionedGroup,
    context_settings=SETTINGS,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench_app = typer.Typer(help="Measure this machine.", cls=SectionedGroup, no_args_is_help=True, rich_markup_mode=None)

WRITTEN = " or ".join(code.name for code in written_codes())
# The section of `headrace plan`'s options that are about other things than training.
WINGS = "Generation and compression"
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (default: this process's) and exit."""
    set_process_defaults()
    words = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    with plain_usage_errors(), guarded_streams():
        # Not standalone, because that mode prints a usage error on several lines in a form of its own.
        code = asked_of(app, words)(words, prog_name="headrace", standalone_mode=False)
    if code == INTERRUPTED:  # without a command, Typer swallows the exception
        leave("interrupted", INTERRUPTED)
    raise SystemExit(code or 0)


def command(section: str, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes a function a command in a section of `headrace --help`."""
    return app.command(name, cls=SectionedCommand, rich_help_panel=section)


def _in(section: str, text: str, *names: str, **more: Any) -> Any:
    """Return an option whose help `text` stands in a section of a command's `--help`."""
    return typer.Option(*names, help=text, rich_help_panel=section, **more)


def _listing_codes(option: Declaration) -> Declaration:
    return replace(option, help=f"Code for the weights: {WRITTEN}.") if option.key == "to" else option


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


_STAGES = "Train blocks in stages on several machines: HOST:PORT of each, with commas between them."


@command(TRAIN)
@plainly
@with_options(RunOptions.declarations())
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN.YAML | MODEL DATA...", help="A YAML file, or model and data; then key=value."),
    ] = None,
    node: Annotated[str | None, _in(Group.CLUSTER, "Compute for the run of this node, HOST:PORT.")] = None,
    wait: Annotated[float, _in(Group.CLUSTER, "Seconds to wait for a node that is not there.", min=0)] = 600.0,
    secret: Annotated[Path | None, _in(Group.CLUSTER, "File with the secret of a node, or of stages.")] = None,
    stages: Annotated[str | None, _in(Group.CLUSTER, _STAGES)] = None,
    stage: Annotated[int | None, _in(Group.CLUSTER, "Which of --stages this process is, from 0.", min=0)] = None,
    **given: Any,
) -> None:
    """Fine-tune a model.

    Every option can also stand in the YAML file, or be given as key=value (with _ for -).
    """
    from headrace.cli.training import begin_or_join

    begin_or_join(words or [], given, launched(), node=node, wait_seconds=wait, secret=secret, stages=(stages, stage))


@command(CLUSTER)
@plainly
@with_options(NodeOptions.declarations())
def node(
    words: Annotated[
        list[str], typer.Argument(metavar="RUN.YAML | MODEL DATA...", help="A YAML file, or model and data; then key=value.")
    ],
    **given: Any,
) -> None:
    """Keep a run's state here while workers compute. Run the same command again to resume."""
    look_at_words(words)
    from headrace.cli.configuration import config_of

    config = config_of(words, given, NodeOptions)
    look_at_choices(config, at_node=config.local_steps is None)
    config = with_model_here(config)
    from headrace.cli.runs import serve_run

    serve_run(config)


@command(TRAIN)
@plainly
def resume(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    stages: Annotated[str | None, _in(Group.CLUSTER, _STAGES)] = None,
    stage: Annotated[int | None, _in(Group.CLUSTER, "Which of --stages this process is, from 0.", min=0)] = None,
    secret: Annotated[Path | None, _in(Group.CLUSTER, "File with the secret of stages.")] = None,
) -> None:
    """Resume a run after its last committed step: after a crash, Ctrl-C or a power cut."""
    from headrace.cli.training import go_on as run

    run(run_directory, launched(), secret=secret, stages=(stages, stage))


@command(USE)
@plainly
@with_options(GenerateOptions.declarations())
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL | RUN_DIR", help="Model directory, OWNER/NAME on the Hub, or a run.")],
    **given: Any,
) -> None:
    """Answer a prompt or a file of prompts, or hold a conversation."""
    model = str(model_here(model))
    look_at_place(model)
    from headrace.cli.generating import generate_answers as run

    run(model, GenerateOptions.of(given), launched())


@command(USE)
@plainly
@with_options(ServeOptions.declarations())
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL | RUN_DIR", help="Model directory, OWNER/NAME on the Hub, or a run.")],
    **given: Any,
) -> None:
    """Answer requests of OpenAI's API: chat and completions, streaming."""
    model = str(model_here(model))
    look_at_place(model)
    from headrace.cli.serving import serve_model

    serve_model(model, given)


@command(USE, "eval")
@plainly
@with_options(EvalOptions.declarations())
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL | RUN_DIR", help="Model directory, OWNER/NAME on the Hub, or a run.")],
    *,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Measure a model's loss on held-out data. Nothing is trained or changed."""
    model = str(model_here(model))
    look_at_place(model)
    look_at_data(given.get("data") or ())
    from headrace.cli.evaluating import evaluate_model

    evaluate_model(model, given, as_json=as_json)


@command(TRAIN)
@plainly
def export(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN_DIR")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory or file OUT.gguf to write; must not exist.")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge a run's adapters into the model, and write all of it.")] = False,
    outtype: Annotated[str | None, typer.Option(help="Numbers of OUT.gguf: bf16, f16 or q8_0. Default: the model's.")] = None,
    push_to_hub: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Send it to the Hub, too.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A model that is new on the Hub is private.")] = False,
) -> None:
    """Write a run's model, or its adapters, as a Hugging Face directory or a GGUF file. The run need not be finished."""
    if push_to_hub is not None:
        from headrace.files.hub_push import refuse_unpushable

        refuse_unpushable(push_to_hub)  # before what takes seconds to import
    from headrace.cli.exporting import exported

    typer.echo(exported(run_directory, out, merge=merge, outtype=outtype, name=push_to_hub, private=private))


@command(SHRINK)
@plainly
@with_options(_listing_codes(each) for each in CompressOptions.declarations() if each.key not in ("model", "output"))
def compress(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model directory, or OWNER/NAME on the Hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
    **given: Any,
) -> None:
    """Write a model with smaller weights, block by block. Run the same command again to resume."""
    model = model_here(model)
    look_at_model(model)
    from headrace.cli.compressing import compress_model

    compress_model(model, out, given)


@command(SHRINK)
@plainly
def decompress(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of a compressed model.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; must not exist.")],
) -> None:
    """Write a compressed model as an ordinary directory, in 16 bits."""
    model = model_here(model)
    look_at_model(model)
    from headrace.cli.compressing import decompress_model

    decompress_model(model, out)


@command(TRAIN)
@plainly
def data(
    source: Annotated[str, typer.Argument(metavar="RUN_DIR | FILE", help="A run, or data as `train` takes it.")],
    model: Annotated[Path | None, typer.Option(help="Model directory whose tokenizer reads FILE.")] = None,
    show: Annotated[int, typer.Option(min=0, help="Samples to print.")] = 3,
    sequence_length: Annotated[int | None, typer.Option(help="Tokens of one row.")] = None,
    template_date: Annotated[str | None, typer.Option(help="The day for a chat template that asks: YYYY-MM-DD.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="File with a chat template, in place of the tokenizer's.")] = None,
    border: Annotated[str | None, typer.Option(help="Tokens at the border of prompt and completion: joint or apart.")] = None,
    as_json: Json = False,
) -> None:
    """Show what will be trained on: real samples with the trained tokens marked, lengths, totals."""
    from headrace.cli.samples import show_samples

    changes = {"sequence_length": sequence_length, "template_date": template_date, "chat_template": chat_template}
    changes |= {"border": border}
    model = model_here(model) if model is not None else None
    show_samples(
        source, {key: value for key, value in changes.items() if value is not None}, model=model, count=show, as_json=as_json
    )


@command(PLAN)
@plainly
def doctor(
    ssd: Annotated[list[Path] | None, typer.Option(help="Directory to look at and measure; repeatable.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure the speed of each directory (a few seconds each).")] = True,
    node: Annotated[str | None, typer.Option(help="HOST:PORT of a node: measure the link to it, both ways.")] = None,
    secret: Annotated[Path | None, typer.Option(help="File with the node's secret.")] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine is and can do. Paste the output into bug reports."""
    from headrace.cli.machine_sheet import link_to, machine_sheet, sheet_text

    link = link_to(node, secret) if node else None
    sheet: dict[str, Any] = machine_sheet(tuple(ssd or ()), measure=measure, link=link)
    if as_json:
        import json

        typer.echo(json.dumps(sheet, indent=2))
    else:
        typer.echo(sheet_text(sheet))


@command(TIDY)
@plainly
def clean(
    directories: Annotated[list[Path] | None, typer.Argument(metavar="[DIR...]", help="SSD or run directories.")] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Also remove runs that could be resumed or were moved, and what they need.")
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="Remove what is kept outside runs, and copies of weights in DIR.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list.")] = False,
) -> None:
    """Remove state that dead runs left on SSDs, or caches. Runs in use, resumable or moved are kept."""
    from headrace.cli.cleaning import clean_all

    places = directories or []
    missing = [directory for directory in places if not directory.is_dir()]
    if missing:
        leave(f"{missing[0]}: no such directory; name the SSD or run directories to clean", 2)
    if not places and not cache:
        leave("nothing to clean was named; name SSD or run directories, or give --cache", 2)
    for line in clean_all(places, cache=cache, unfinished=unfinished, dry_run=dry_run):
        typer.echo(line)


for each in (report, watch, migrate, schema):
    command(TRAIN)(each)
app.add_typer(bench_app, name="bench", rich_help_panel=PLAN)


@command(PLAN)
@plainly
@with_options(PlanOptions.declarations())
def plan(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN.YAML | MODEL [DATA...]",
            help="A YAML file; or a directory, config.json or OWNER/NAME on the Hub, and data; then key=value.",
        ),
    ],
    data: Annotated[list[str] | None, _in(Group.DATA, "Data of the run: its length is one pass. Repeatable.")] = None,
    generates: Annotated[bool, _in(WINGS, "Plan generation, not training.", "--generate")] = False,
    prompt_length: Annotated[int, _in(WINGS, "Tokens of a prompt.", min=1)] = 512,
    new_tokens: Annotated[int, _in(WINGS, "Tokens of an answer.", min=1)] = 128,
    batch: Annotated[int, _in(WINGS, "Number of prompts.", min=1)] = 1,
    compress: Annotated[
        str | None, _in(WINGS, f"Plan compressing the model to {WRITTEN}; with --generate, how its result would answer.")
    ] = None,
    *,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Say whether a model fits, how fast it will be, and what limits it.

    It needs config.json only, no weights. It takes a run's file and every option of `headrace train`.
    """
    # A search makes millions of small objects and no cycles: looking for cycles would take a seventh of the time.
    gc.set_threshold(100_000, 50, 100)
    from headrace.cli.configuration import plan_options_of

    options, asked = plan_options_of(words, data or (), given)
    look_at_configuration(str(options.model))
    look_at_plan_names(options, compress)
    look_at_data(options.data)
    from headrace.cli.kept_plans import answered_plan

    answer = answered_plan(options, asked, (batch, prompt_length, new_tokens) if generates else None, compress)
    from headrace.cli.screen import show

    typer.echo(answer["json"]) if as_json else show(answer["whole" if options.verbose else "brief"])


@bench_app.command("machine", cls=SectionedCommand)
@plainly
def bench_machine(
    ssd: Annotated[list[Path] | None, typer.Option(help="Directory on an SSD; repeatable. Default: the current one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Profile to write. Default: where `plan` and `train` look.")] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure. Writes to the SSDs a third of the time.")] = 90.0,
    as_json: Json = False,
) -> None:
    """Measure what this machine can do, for plans: compute, memory, copies, SSDs, alone and at once."""
    from headrace.cli.planning import measure_this_machine as measure

    typer.echo(measure(ssd or (), output, seconds=seconds, as_json=as_json))
