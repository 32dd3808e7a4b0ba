"""A file of prompts as a job that can be killed at any time: each finished micro-batch is kept, and none is done twice.

    answers.jsonl.job/record.json   what fixes the bits: the input's digest, options, micro-batches, seeds, threads
    answers.jsonl.job/done.jsonl    one line for each micro-batch that is done (`store.work`)
    answers.jsonl                   the answers, in the order of the input, when all are there; then the folder is removed

Invariant: the output follows from the record alone: an interrupted job gives the same bytes.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from headrace.data.chat.chat_template import asks_for_time
from headrace.data.chat.prompt_lines import PromptLine, read_line
from headrace.data.chat.prompts import Prompts
from headrace.files.durable import write_whole
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import kept_copies
from headrace.generate.plan.compose import composed
from headrace.generate.plan.plan import FewRows, GenerationPlan
from headrace.generate.plan.seat_shapes import PromptLengths, SeatShapes
from headrace.generate.uses.answering import changes_of
from headrace.generate.uses.job_tasks import Answers, Helpers, JobShape, JobTask, answered, line_settings_of
from headrace.machine.cpu import processor_name
from headrace.model.seats.generation_keys import is_assisted
from headrace.store.work import Work, day_begun, held
from headrace.terms.errors import DataError, InputError, RunDirectoryError, StepFailed, StorageError, unwritten
from headrace.terms.events import Notice, Sink
from headrace.terms.options.generate_options import ON_DEVICE, ON_HOST, GenerateOptions
from headrace.terms.sizes import format_seconds

# Options that decide the answers, with their defaults. A job with another value for one of these is another job.
_DEFAULTS = GenerateOptions().to_json()
_FIXED = {each.key: _DEFAULTS[each.key] for each in GenerateOptions.declarations() if each.fixed}


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a job."""

    done: int
    of: int
    tokens: int
    seconds: float
    padding: float  # share of the prompts' positions that are padding


def run_job(
    generator: Generator,
    options: GenerateOptions,
    *,
    sink: Sink,
    tell_plan: Callable[[GenerationPlan], None],
    progress: Callable[[JobProgress], None],
    helpers: Helpers | None = None,
) -> int:
    """Answer the lines of `options.input` into `options.output`; return how many of them could not be answered. `helpers` are
    other ranks that take their share of the micro-batches.

    Raises:
        PeerLost: one of them is gone.
        InputError: the input cannot be read or is empty; the output exists; or a job with other options is under way there.
        StorageError: something cannot be written; what is done is kept.
    """
    source, output = Path(str(options.input)), Path(str(options.output))
    folder = output.with_name(output.name + ".job")
    if output.exists():
        raise RunDirectoryError(f"output: {output} exists; name a new file, or remove it")
    tokenizer = generator.model.tokenizer()
    day = options.template_date or generator.model.here.template_date or _day_of(folder, tokenizer)
    options, changes = replace(options, template_date=day), changes_of(generator, options, tokenizer)
    lines, digest = _read(source, Prompts(tokenizer, options.raw, options.system, day, options.template_variables))
    lines = [_fitting(line, generator, changes) for line in lines]
    left = [line for line in lines if not line.error]
    answers: dict[int, dict[str, Any]] = {line.number: line.refused(line.error) for line in lines if line.error}
    tasks: list[JobTask] = []
    shape = JobShape(0, 0, 0, {})
    with held(folder):
        values = options.to_json()
        work = Work.open(folder, {"input": digest, **{key: values[key] for key in _FIXED}}, _FIXED)
        job = _Job(work, {line.number: line for line in left}, answers, progress)
        if left:
            plan, shape = _plan(generator, left, options, changes, _begun(work, left))
            tasks = job.begin(plan, options.seed, sink)
            tell_plan(plan)
            lost = format_seconds(_micro_batch_seconds(plan))
            sink(Notice(text=f"a kill costs at most the answers under way: about {lost} of work", level="info"))
        with _writing(folder):
            own = helpers.deal(tasks, shape, job.keep) if helpers else tasks
            for number, found in answered(generator, options, tokenizer, own) if own else ():
                job.keep(number, found)
                if helpers is not None:
                    helpers.look()
            if helpers is not None:
                helpers.finish()
        with _writing(output):
            write_whole(output, "".join(_written(answers[line.number]) + "\n" for line in lines))
    return len(lines) - len(left) + job.refused


def _written(answer: Mapping[str, Any]) -> str:
    """Return an answer as JSON; one with half a character, as its line had it, in escapes."""
    found = json.dumps(answer, ensure_ascii=False)
    try:
        found.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(answer)
    return found


def _read(source: Path, prompts: Prompts) -> tuple[list[PromptLine], str]:
    try:
        content = source.read_bytes()
    except OSError as error:
        raise DataError(f"input: {source}: cannot be read ({error.strerror}); name a JSONL file of prompts") from error
    try:
        texts = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"input: {source}: no UTF-8 at byte {error.start}; convert the file") from error
    lines = [read_line(number, text, prompts) for number, text in enumerate(texts, start=1) if text.strip()]
    if not lines:
        raise DataError(f"input: {source} is empty; give a line with prompt or messages for each answer")
    return lines, hashlib.sha256(content).hexdigest()


def _fitting(line: PromptLine, generator: Generator, changes: Mapping[str, Any]) -> PromptLine:
    """Return the line, with an error if the model has no embedding or too few positions for it, or its settings are refused."""
    if line.error:
        return line
    try:
        generator.model.check_tokens(line.ids)
        line_settings_of(line.settings, generator, changes, len(line.ids))
    except InputError as error:
        return PromptLine(line.number, line.values, error=f"line {line.number}: {error}")
    return line


def _plan(
    generator: Generator,
    lines: Sequence[PromptLine],
    options: GenerateOptions,
    changes: Mapping[str, Any],
    begun: Mapping[str, Any] | None,
) -> tuple[GenerationPlan, JobShape]:
    """Return, and use, a plan whose micro-batches take no longer than may be lost, if there is one; and what it follows from.

    Of a job that was `begun` it has the rows, the chunks of prompts, the ways of products, and the place of attention.
    """
    longest = max(len(line.ids) for line in lines)
    settings = [line_settings_of(line.settings, generator, changes, len(line.ids)) for line in lines]
    new = max(int(each["generation_config"].max_new_tokens) for each in settings)
    copies = max(map(kept_copies, settings))
    prompts, least = len(lines), 1
    fixed: dict[str, Any] = {"rows": 1} if any(map(is_assisted, settings)) else {}
    if begun is not None:
        least = max(map(len, begun["micro_batches"]))
        fixed = {**_seats_of(begun, lines), "prefill_chunk": begun.get("prefill_chunk", 0)}
        fixed["few_rows"] = FewRows(packed=begun.get("packed_rows", 0) > 0, narrow=begun.get("narrow_rows", 0) > 0)
        fixed["attention"] = begun.get("attention", ON_DEVICE)
    elif not copies:
        fixed = {**fixed, "lengths": PromptLengths(tuple(len(line.ids) for line in lines), tuple(_kinds(lines)))}
    shape = JobShape(longest, new, copies, fixed)
    plan = shape.plan(generator, prompts)
    while _micro_batch_seconds(plan) > options.most_lost and prompts > least:
        prompts = max(least, plan.rows * plan.seats // 2)
        plan = shape.plan(generator, prompts)
    generator.use(plan)
    place = ON_HOST if plan.caches.attends else ON_DEVICE
    few_rows = FewRows(packed=plan.packed_rows > 0, narrow=plan.narrow_rows > 0)
    same = {"prefill_chunk": plan.most_costs.prefill_chunk, "few_rows": few_rows, "attention": place}
    same |= {"rows": plan.rows} if plan.shapes is None else {"shapes": plan.shapes}
    return plan, replace(shape, fixed=same)


def _seats_of(begun: Mapping[str, Any], lines: Sequence[PromptLine]) -> dict[str, Any]:
    """Return what fixes the seats for the micro-batches of a job that was begun: their shapes, or the most rows."""
    batches, tokens = begun["micro_batches"], {line.number: len(line.ids) for line in lines}
    if not begun.get("by_length"):
        return {"rows": max(map(len, batches))}
    return {"shapes": SeatShapes(tuple((len(batch), max(tokens[number] for number in batch)) for batch in batches))}


def _kinds(lines: Sequence[PromptLine]) -> list[str]:
    return [json.dumps(line.settings, sort_keys=True) for line in lines]


def _micro_batch_seconds(plan: GenerationPlan) -> float:
    assert plan.forecast is not None, "plans are made with one"
    return plan.forecast.first_pass_seconds + (plan.new_tokens - 1) * plan.forecast.pass_seconds


def _day_of(folder: Path, tokenizer: Any) -> str | None:
    """Return the day of a job for templates that ask for it: today, or the one on which it was begun; None where none asks."""
    return (day_begun(folder) or date.today().isoformat()) if asks_for_time(tokenizer) else None


def _begun(work: Work, lines: Sequence[PromptLine]) -> Mapping[str, Any] | None:
    """Return what a job that was begun has written down, None for a new one; `lines` are those that can be answered.

    Raises:
        RunDirectoryError: it has other prompts, as an earlier version read them.
    """
    if not work.has_begun:
        return None
    members = sorted(number for batch in work.record.get("micro_batches", ()) for number in batch)
    if members != [line.number for line in lines] or work.record.get("prompts") != _digest(lines):
        raise RunDirectoryError(
            f"{work.folder} holds an unfinished job of other prompts: another model, or an earlier version, read them "
            "differently; remove it and start again"
        )
    return work.record


def _digest(lines: Sequence[PromptLine]) -> str:
    return hashlib.sha256(json.dumps([line.ids for line in lines]).encode()).hexdigest()


class _Job:
    """What a job has answered, and what is left. `answers`, by line, gets what is kept; of it `refused` lines have an error."""

    def __init__(
        self,
        work: Work,
        lines: Mapping[int, PromptLine],
        answers: dict[int, dict[str, Any]],
        progress: Callable[[JobProgress], None],
    ) -> None:
        self._work, self._lines, self._answers, self._progress = work, lines, answers, progress
        self._padding, self.refused = 0.0, 0
        self._start, self._tokens, self._lock = time.monotonic(), 0, threading.Lock()

    def begin(self, plan: GenerationPlan, seed: int, sink: Sink) -> list[JobTask]:
        """Write down a new job, or take the answers that an earlier process kept; return the micro-batches that are left."""
        environment = {"threads": torch.get_num_threads(), "processor": processor_name()}
        record, lines = self._work.record, self._lines
        if not self._work.has_begun:
            record |= {"here": environment, **_batches_of(list(lines.values()), plan, seed)}
            with _writing(self._work.folder):
                self._work.begin()
        elif record["here"] != environment:
            begun = f"{self._work.folder}: the job was begun with {record['here']}, here are {environment}"
            sink(Notice(text=f"{begun}: bits may differ from here on"))
        for item in self._work.done():
            self._take(item["micro_batch"], item["answers"])
        batches = record["micro_batches"]
        places = sum(len(members) * max(len(lines[line].ids) for line in members) for members in batches)
        self._padding = 1 - sum(len(line.ids) for line in lines.values()) / places
        self._start = time.monotonic()
        return [
            JobTask(number, tuple(lines[line].ids for line in members), seed, lines[members[0]].settings)
            for number, (members, seed) in enumerate(zip(batches, record["seeds"], strict=True))
            if members[0] not in self._answers
        ]

    def keep(self, number: int, found: Answers) -> None:
        """Keep a micro-batch's answers, from any thread: on return they are durable."""
        with self._lock:
            self._work.add({"micro_batch": number, "answers": found})
            self._take(number, found)
            self._tokens += sum(each["completion_tokens"] for each in found)
            done = sum(line in self._answers for line in self._lines)
            seconds = time.monotonic() - self._start
            self._progress(JobProgress(done, len(self._lines), self._tokens, seconds, self._padding))

    def _take(self, number: int, found: Answers) -> None:
        for line, each in zip(self._work.record["micro_batches"][number], found, strict=True):
            words, error = self._lines[line], each.get("error")
            self._answers[line] = words.refused(f"line {line}: {error}") if error else words.answered(each)
            self.refused += bool(error)


def _batches_of(lines: Sequence[PromptLine], plan: GenerationPlan, seed: int) -> dict[str, Any]:
    """Return what a new job writes down: its micro-batches, and what fixes their bits."""
    batches = composed([len(line.ids) for line in lines], _kinds(lines), plan.rows if plan.shapes is None else plan.room)
    own = [lines[batch[0]].settings.get("seed") for batch in batches]
    return {
        "micro_batches": [[lines[index].number for index in batch] for batch in batches],
        "seeds": [seed + place if each is None else each for place, each in enumerate(own)],
        "prompts": _digest(lines),
        "prefill_chunk": plan.most_costs.prefill_chunk,
        "packed_rows": plan.packed_rows,
        "by_length": plan.shapes is not None,
        "narrow_rows": plan.narrow_rows,
        "attention": ON_HOST if plan.caches.attends else ON_DEVICE,
    }


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Report in one line that something cannot be written, and that what is done is kept."""
    try:
        yield
    except StorageError:
        raise
    except StepFailed as error:
        if isinstance(cause := error.__cause__, StorageError):
            raise type(cause)(f"{cause}; give the same command again later: what is done is kept") from error
        raise
    except OSError as error:
        raise unwritten(place, error, "give the same command again: what is done is kept") from error
