"""What is left of a job of prompts: micro-batches as values that can be sent, and how one process answers them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows
from headrace.generate.plan.plan import FewRows, GenerationPlan
from headrace.generate.plan.seat_shapes import SeatShapes
from headrace.generate.uses.answering import answers_of, changes_of
from headrace.generate.uses.watching import watched
from headrace.terms.options.generate_options import GenerateOptions

Answers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class JobTask:
    """A micro-batch: rows of token ids, the `seed` of its random numbers, and the `settings` of its lines."""

    number: int
    rows: tuple[tuple[int, ...], ...]
    seed: int
    settings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "JobTask":
        """Return it from what `to_json` made."""
        return cls(values["number"], tuple(map(tuple, values["rows"])), values["seed"], values["settings"])


@dataclass(frozen=True, slots=True)
class JobShape:
    """What plans follow from: the longest prompt, the most new tokens, copies of caches, and what is `fixed` for all."""

    longest: int
    new: int
    copies: int
    fixed: Mapping[str, Any]

    def plan(self, generator: Generator, prompts: int, **fixed: Any) -> GenerationPlan:
        """Return the plan for so many prompts. Raises as `Generator.plan_only` does."""
        return generator.plan_only(prompts, self.longest, self.new, self.copies, **{**self.fixed, **fixed})

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "JobShape":
        """Return it from what `to_json` made."""
        fixed = dict(values["fixed"])
        if "few_rows" in fixed:
            fixed["few_rows"] = FewRows(**fixed["few_rows"])
        if "shapes" in fixed:
            fixed["shapes"] = SeatShapes(tuple((rows, length) for rows, length in fixed["shapes"]["each"]))
        return cls(values["longest"], values["new"], values["copies"], fixed)


def line_settings_of(
    settings: Mapping[str, Any], generator: Generator, changes: Mapping[str, Any], longest: int
) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` for lines with these `settings`."""
    own = {key: value for key, value in settings.items() if key != "seed"}
    return generator.model.settings(longest, None, {**changes, **own})


class Helpers(Protocol):
    """Other processes that take their share of a job."""

    def deal(self, tasks: Sequence[JobTask], shape: JobShape, keep: Callable[[int, Answers], None]) -> Sequence[JobTask]:
        """Share out the tasks, and return those of this process. `keep` gets the others' answers, in threads of their own."""

    def look(self) -> None:
        """Raise what went wrong with the answers of others.

        Raises:
            PeerLost: a process is gone. StorageError: its answers cannot be written.
        """

    def finish(self) -> None:
        """Wait for the answers of all, and let the others go. Raises as `look` does."""


def answered(
    generator: Generator, options: GenerateOptions, tokenizer: Any, tasks: Sequence[JobTask]
) -> Iterator[tuple[int, Answers]]:
    """Yield the number of each micro-batch and its rows' answers, as they are done. Raises as `Generator.run` does."""
    changes = changes_of(generator, options, tokenizer)

    def batch(task: JobTask) -> SeatRows:
        settings = line_settings_of(task.settings, generator, changes, max(map(len, task.rows)))
        return SeatRows(task.number, task.rows, task.seed, watched(settings, task.rows))

    for done in generator.run(map(batch, tasks)):
        yield done.batch.number, list(_found(done))


def _found(done: Generated) -> Iterator[dict[str, Any]]:
    for answer in answers_of(done):
        yield (
            {"error": answer.error, "completion_tokens": answer.completion_tokens}
            if answer.error
            else {
                "completion": answer.text,
                "finish_reason": answer.finish_reason,
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "micro_batch": done.batch.number,
                "seed": done.batch.seed,
            }
        )
