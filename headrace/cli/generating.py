"""`headrace generate`: stdout gets the text and nothing else; stderr gets plans, progress and errors.

Invariant: printed text stays.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import headrace
from headrace.cli.plain_errors import INTERRUPTED, REFUSED, leave
from headrace.cli.screen import say, tell
from headrace.plan.clock.machine_profiles import load_profile
from headrace.process import heavy_imports, machine_profile_path
from headrace.terms.errors import ConfigError, PeerLost
from headrace.terms.launch import Launch
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.serve_options import ServeOptions
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_seconds

_Options = TypeVar("_Options", GenerateOptions, EvalOptions, ServeOptions)
_BYE = ("/bye", "/exit", "/quit")


def generate_answers(model: str, options: GenerateOptions, launch: Launch | None = None) -> None:
    """Answer a prompt or hold a conversation, according to `options`. Processes of a `launch` share out a file of prompts.

    Raises:
        InputError, PlanInfeasible, StorageError: see the functions that it calls.
    """
    if options.input is not None:
        if launch is None:
            _answer_file(model, options)
        else:
            _answer_in_ranks(model, options, launch)
        return
    if launch is not None:
        if launch.rank:
            raise SystemExit(REFUSED)  # rank 0 says it
        raise ConfigError(
            "prompt: several processes share out a file of prompts; give --input and --output, or leave torchrun out"
        )
    talks = sys.stdin.isatty() and sys.stdout.isatty()
    if options.prompt is None and not talks:
        raise ConfigError("prompt: none was given; give --prompt TEXT, --prompt - for standard input, or --input and --output")
    try:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt: standard input is no {error.encoding} at byte {error.start}; convert it") from error
    with heavy_imports():
        from headrace.generate.passes.measured import Measured
        from headrace.generate.passes.whose_weights import open_generator
        from headrace.generate.uses.answering import Answerer

    measured = Measured(say)
    try:
        with Answerer(open_generator(Path(model), with_machine(options), measured), options, say) as talk:
            if prompt is not None:
                tokens = talk.answer(prompt, _write, tell_plan).completion_tokens
                _write("\n")
            else:
                tokens = _converse(talk)
            _tell_measured(measured.words(talk.generator.plan, tokens))
    except KeyboardInterrupt:
        _write("\n")
        leave("interrupted", INTERRUPTED)


def _answer_in_ranks(model: str, options: GenerateOptions, launch: Launch) -> None:
    """Answer a file with the other ranks of `launch`, each with its share of the machine."""
    from headrace.generate.passes.whose_weights import open_generator
    from headrace.peers import RankHelpers, Ranks, answer_for, host_bytes_of_rank, take_gpu

    if options.host_memory is None:
        options = replace(options, host_memory=host_bytes_of_rank(launch))
    take_gpu(launch)
    with Ranks.of(launch, headrace.__version__) as ranks:
        if launch.rank == 0:
            _answer_file(model, options, RankHelpers(ranks))
            return
        with suppress(PeerLost, KeyboardInterrupt):  # rank 0 says it
            with open_generator(Path(model), with_machine(options), None) as generator:
                answer_for(generator, options, ranks)
            return
    raise SystemExit(REFUSED)


def _answer_file(model: str, options: GenerateOptions, helpers: Any = None) -> None:
    """Answer a file; the exit code is 1 if a line could not be answered."""
    with heavy_imports():
        from headrace.generate.passes.measured import Measured
        from headrace.generate.passes.whose_weights import open_generator
        from headrace.generate.uses.jobs import JobProgress, run_job

    measured, tokens = Measured(say), 0

    def progress(found: JobProgress) -> None:
        nonlocal tokens
        tokens = found.tokens
        speed = found.tokens / found.seconds if found.seconds else 0.0
        left = (found.of - found.done) * found.seconds / max(1, found.done)
        words = f"{found.done} of {found.of} answers, {plain_figure(speed)} tokens/s, {format_seconds(left)} left"
        tell(f"{words}, {found.padding:.0%} of the prompts' rows padding")

    try:
        with open_generator(Path(model), with_machine(options), measured) as generator:
            refused = run_job(generator, options, sink=say, tell_plan=tell_plan, progress=progress, helpers=helpers)
            _tell_measured(measured.words(generator.plan, tokens))
    except KeyboardInterrupt:
        leave("interrupted; the same command resumes it", INTERRUPTED)
    if refused:
        leave(f"{refused} line{'s' if refused > 1 else ''} could not be answered; {options.output} says why", 1)


def with_machine(options: _Options) -> _Options:
    """Return options with the machine to plan for: the one that is named, or what was measured of this one."""
    machine, measured = options.machine, machine_profile_path()
    if machine is None and measured.exists():
        machine = str(measured)
    return replace(options, machine=load_profile(machine)) if isinstance(machine, str) else options


def _converse(talk: Any) -> int:
    """Hold a conversation; return how many tokens its answers had."""
    messages: list[dict[str, str]] = []
    tokens = 0
    while True:
        sys.stderr.write("> ")
        sys.stderr.flush()
        words = sys.stdin.readline()
        if not words or words.strip() in _BYE:
            return tokens
        if not words.strip():
            continue
        messages.append({"role": "user", "content": words.rstrip("\n")})
        answer = talk.answer(messages, _write, tell_plan)
        _write("\n")
        messages.append({"role": "assistant", "content": answer.text})
        tokens += answer.completion_tokens


def tell_plan(plan: Any) -> None:
    """Print a plan to stderr."""
    for line in plan.explain().splitlines():
        tell(line)


def _tell_measured(words: str) -> None:
    if words:
        tell(words)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
