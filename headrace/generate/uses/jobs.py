"""A file of prompts as a job that can be killed at any time: each finished micro-batch is kept, and none is done twice.

    answers.jsonl.job/job.json      what fixes the bits: the input's digest, options, micro-batches, seeds, threads
    answers.jsonl.job/done.jsonl    one line for each micro-batch that is done, durable before the next one is counted
    answers.jsonl                   the answers, in the order of the input, when all are there; then the folder is removed

Invariant: the output follows from `job.json` alone: an interrupted job gives the same bytes.
"""

import hashlib
import json
import os
import shutil
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
from headrace.terms.errors import (
    DataError,
    InputError,
    RunDirectoryError,
    StepFailed,
    StorageError,
    in_one_line,
    unwritten,
)
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
    changes = changes_of(generator, options, tokenizer)
    day = options.template_date or generator.model.here.template_date or _day_of(folder, tokenizer)
    lines, digest = _read(source, Prompts(tokenizer, options.raw, options.system, day))
    lines = [_fitting(line, generator, changes) for line in lines]
    left = [line for line in lines if not line.error]
    answers: dict[int, dict[str, Any]] = {line.number: line.refused(line.error) for line in lines if line.error}
    work = _Work(folder, {line.number: line for line in left}, answers, progress)
    tasks: list[JobTask] = []
    shape = JobShape(0, 0, 0, {})
    if left:
        begun = _begun(folder, left, generator.model.generation_config.max_length is not None)
        plan, shape = _plan(generator, left, options, changes, begun)
        job = _job(folder, digest, replace(options, template_date=day), left, plan, begun, sink)
        tell_plan(plan)
        lost = format_seconds(_micro_batch_seconds(plan))
        sink(Notice(text=f"a kill costs at most the answers under way: about {lost} of work", level="info"))
        tasks = work.begin(job)
    with work.keeping() as keep:
        own = helpers.deal(tasks, shape, keep) if helpers else tasks
        for number, found in answered(generator, options, tokenizer, own) if own else ():
            keep(number, found)
            if helpers is not None:
                helpers.look()
        if helpers is not None:
            helpers.finish()
    with _writing(output):
        write_whole(output, "".join(_written(answers[line.number]) + "\n" for line in lines))
        shutil.rmtree(folder, ignore_errors=True)
    return len(lines) - len(left) + work.refused


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
    if not asks_for_time(tokenizer):
        return None
    try:
        found = json.loads((folder / "job.json").read_text(encoding="utf-8")).get("template_date")
    except (OSError, ValueError, AttributeError):  # not begun; or damaged, which is said where all of it is read
        return date.today().isoformat()
    return found if isinstance(found, str) else None


def _begun(folder: Path, lines: Sequence[PromptLine], bounded: bool) -> dict[str, Any] | None:
    """Return what a job that was begun has written down; `lines` are those that can be answered. `bounded`: the model has a
    `max_length`, which earlier versions passed over, as they did `tools`.

    Raises:
        RunDirectoryError: it cannot be read, or has other prompts, as an earlier version read them.
    """
    path = folder / "job.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        members = sorted(number for batch in found["micro_batches"] for number in batch)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunDirectoryError(f"{path}: cannot be read ({in_one_line(error)}); remove {folder} and begin again") from error
    otherwise = "" if bounded or any(line.has_tools for line in lines) else None
    if members != [line.number for line in lines] or found.get("prompts", otherwise) not in (None, _digest(lines)):
        raise RunDirectoryError(
            f"{folder} holds an unfinished job of other prompts: another model, or an earlier version, read them "
            "differently; remove it and start again"
        )
    return dict(found)


def _digest(lines: Sequence[PromptLine]) -> str:
    return hashlib.sha256(json.dumps([line.ids for line in lines]).encode()).hexdigest()


Job = dict[int, tuple[tuple[int, ...], int]]  # micro-batch -> its lines, its seed


def _job(
    folder: Path,
    digest: str,
    options: GenerateOptions,
    lines: Sequence[PromptLine],
    plan: GenerationPlan,
    unfinished: Mapping[str, Any] | None,
    sink: Sink,
) -> Job:
    """Return the micro-batches: those of a job that was begun, or new ones, which are written down first."""
    values = options.to_json()
    fixed = {"input": digest, "options": {key: values[key] for key in _FIXED}}
    environment = {"threads": torch.get_num_threads(), "processor": processor_name()}
    path = folder / "job.json"
    if (record := unfinished) is not None:
        recorded_options = _FIXED | record["fixed"]["options"]  # an earlier version knew fewer
        if {**record["fixed"], "options": recorded_options} != fixed:
            raise RunDirectoryError(
                f"{folder} holds an unfinished job of another input or other options; finish it with those, or remove it"
            )
        if record["here"] != environment:
            begun = f"{folder}: the job was begun with {record['here']}, here are {environment}"
            sink(Notice(text=f"{begun}: bits may differ from here on"))
    else:
        rows = plan.rows if plan.shapes is None else plan.room
        batches = composed([len(line.ids) for line in lines], _kinds(lines), rows)
        members = [[lines[index].number for index in batch] for batch in batches]
        own = {line.number: line.settings.get("seed") for line in lines}
        seeds = [options.seed + place if own[batch[0]] is None else own[batch[0]] for place, batch in enumerate(members)]
        record = {"fixed": fixed, "here": environment, "micro_batches": members, "seeds": seeds, "prompts": _digest(lines)}
        record["template_date"] = options.template_date
        record["prefill_chunk"], record["packed_rows"] = plan.most_costs.prefill_chunk, plan.packed_rows
        record["by_length"] = plan.shapes is not None
        record["narrow_rows"] = plan.narrow_rows
        record["attention"] = ON_HOST if plan.caches.attends else ON_DEVICE
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(record) + "\n")
    pairs = zip(record["micro_batches"], record["seeds"], strict=True)
    return {number: (tuple(batch), seed) for number, (batch, seed) in enumerate(pairs)}


def _done(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the answers of finished micro-batches; an incomplete last line, left by a kill, is cut off."""
    path = folder / "done.jsonl"
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    lines = (json.loads(line) for line in whole.decode("utf-8").splitlines())
    return {line["micro_batch"]: line["answers"] for line in lines}


class _Work:
    """What a job has answered, and what is left. `answers`, by line, gets what is kept; of it `refused` lines have an error."""

    def __init__(
        self,
        folder: Path,
        lines: Mapping[int, PromptLine],
        answers: dict[int, dict[str, Any]],
        progress: Callable[[JobProgress], None],
    ) -> None:
        self._folder, self._lines, self._answers, self._progress = folder, lines, answers, progress
        self._job: Job = {}
        self._padding, self.refused = 0.0, 0

    def begin(self, job: Job) -> list[JobTask]:
        """Take the answers that an earlier process has kept, and return the micro-batches that are left."""
        self._job = job
        for number, found in _done(self._folder).items():
            self._take(number, found)
        lines, batches = self._lines, [members for members, _ in job.values()]
        places = sum(len(members) * max(len(lines[line].ids) for line in members) for members in batches)
        self._padding = 1 - sum(len(line.ids) for line in lines.values()) / places
        return [
            JobTask(number, tuple(lines[line].ids for line in members), seed, lines[members[0]].settings)
            for number, (members, seed) in job.items()
            if members[0] not in self._answers
        ]

    @contextmanager
    def keeping(self) -> Iterator[Callable[[int, Answers], None]]:
        """Give what keeps a micro-batch's answers, from any thread: on return they are durable."""
        start, tokens, lock = time.monotonic(), 0, threading.Lock()
        if not self._job:
            yield lambda number, found: None
            return
        with _writing(self._folder), (self._folder / "done.jsonl").open("ab") as file:

            def keep(number: int, found: Answers) -> None:
                nonlocal tokens
                with lock:
                    content = json.dumps({"micro_batch": number, "answers": found}, ensure_ascii=False)
                    file.write(content.encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                    self._take(number, found)
                    tokens += sum(each["completion_tokens"] for each in found)
                    done = sum(line in self._answers for line in self._lines)
                    seconds = time.monotonic() - start
                    self._progress(JobProgress(done, len(self._lines), tokens, seconds, self._padding))

            yield keep

    def _take(self, number: int, found: Answers) -> None:
        for line, each in zip(self._job[number][0], found, strict=True):
            words, error = self._lines[line], each.get("error")
            self._answers[line] = words.refused(f"line {line}: {error}") if error else words.answered(each)
            self.refused += bool(error)


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
