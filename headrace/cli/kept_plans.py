"""Answers of `headrace plan` that are kept: a question that was answered needs neither torch nor transformers again.

Only plans by config.json alone for a machine with a profile are kept: what is free here changes, and so do files. Invariant: an
answer is that of this configuration, these options and figures of machines, and these versions of all code that decides it.
"""

import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import headrace
from headrace.cli.first_look import look_at_choices
from headrace.files.durable import write_whole
from headrace.files.model_directory import has_weights
from headrace.process import cache_directory
from headrace.terms.json_text import parse_json
from headrace.terms.options.plan_options import PlanOptions

FOLDER = "plans"
# Options that name a file whose bytes are part of the question, and those whose files are looked at apart or not at all.
_READ, _APART = ("machine", "node_machine"), ("model", "cache")
Answer = Mapping[str, str]


def answered_plan(
    options: PlanOptions, asked: Collection[str], generation: tuple[int, int, int] | None, compress: str | None
) -> Answer:
    """Return what `headrace plan` says, kept or new; `generation` is prompts, and the tokens of each and of its answer.

    Raises: as `planning.answer_plan`.
    """
    place = kept_place(options, asked, generation, compress)
    if (answer := find_answer(place)) is not None:
        return answer
    look_at_choices(options, at_node=options.workers is not None)
    from headrace.cli.planning import GenerationAsked, answer_plan  # late: this brings torch

    counts = dict(zip(("prompts", "prompt_length", "new_tokens"), generation or (), strict=False))
    answer = answer_plan(options, asked, GenerationAsked(**counts) if counts else None, compress)
    keep_answer(place, answer)
    return answer


def kept_place(options: PlanOptions, asked: Collection[str], *more: Any) -> Path | None:
    """Return where the answer to a question lies or would lie; None if it is not to be kept. `more` is asked besides."""
    config = options.model / "config.json" if options.model.is_dir() else options.model
    if options.machine is None or options.html or config.suffix != ".json":
        return None
    if not config.is_file() or has_weights(options.model):
        return None
    read = [config.read_bytes()]
    for name, value in _values(options):
        if name not in _APART and isinstance(value, str | Path) and Path(value).exists():
            if name not in _READ:
                return None
            read.append(Path(value).read_bytes())
    versions = [sys.version, headrace.__version__, *map(version, ("torch", "transformers")), *_stamps()]
    alike = replace(options, verbose=False), sorted({*asked} - {"verbose"})
    question = repr((*alike, more, versions, [sha256(each).hexdigest() for each in read]))
    return cache_directory() / FOLDER / f"{sha256(question.encode()).hexdigest()[:32]}.json"


def find_answer(place: Path | None) -> Answer | None:
    """Return the answer that is kept there, None if none is."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = parse_json(place.read_bytes()) if place else None
        if isinstance(found, dict) and all(isinstance(each, str) for each in found.values()):
            return found
    return None


def keep_answer(place: Path | None, answer: Answer) -> None:
    """Keep an answer, if it is to be kept and can be written."""
    with contextlib.suppress(OSError):
        if place:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps(answer))


def _values(options: PlanOptions) -> Iterator[tuple[str, Any]]:
    for each in fields(options):
        value = getattr(options, each.name)
        for one in value if isinstance(value, tuple | list) else (value,):
            yield each.name, one


def _stamps() -> Iterator[str]:
    """Yield the time and size of each file of the package: another one may decide otherwise."""
    folder = Path(headrace.__file__).parent
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.json"))):
        stat = path.stat()
        yield f"{path.relative_to(folder)} {stat.st_mtime_ns} {stat.st_size}"
