"""Generation as a user sees it: one prompt whose answer is printed as it comes, or a conversation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headrace.data.chat.prompts import Messages, Prompts
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows, kept_copies
from headrace.generate.passes.opened import end_tokens
from headrace.generate.uses.watching import watch_of, watched
from headrace.model.blocks.building import model_read_from
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, ModelError, in_one_line
from headrace.terms.events import Sink
from headrace.terms.options.generate_options import GenerateOptions

# A conversation is planned for at least so many tokens, so that not each of its turns needs other buffers.
_LEAST_CONVERSATION = 1024
STOP, LENGTH = "stop", "length"
_NOT_FINITE = (
    "the logits of token {} are not finite (NaN or infinity), so no token can be chosen; try --compute-dtype float32. If that "
    "does not help, `headrace eval` names the weight that is damaged"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its text, why it ends (`stop` or `length`), and the numbers of tokens. `error`: why there is none. Of the
    prompt, `cached_tokens` were kept and not read.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    error: str = ""
    cached_tokens: int = 0


class Answerer(Closing):
    """A model that answers prompts one after the other. Use as a context manager."""

    def __init__(self, generator: Generator, options: GenerateOptions, sink: Sink | None = None) -> None:
        self.generator, self._options, self._sink = generator, options, sink
        self._tokenizer = generator.model.tokenizer()
        day = options.template_date or generator.model.here.template_date
        self._prompts = Prompts(self._tokenizer, options.raw, options.system, day, options.template_variables)
        self._count = 0

    def answer(self, prompt: str | Messages, write: Callable[[str], None], plan: Callable[[Any], None] | None = None) -> Answer:
        """Answer a text or a conversation; the text of the answer goes to `write` as it comes.

        `plan` gets the plan before anything is computed.

        Raises:
            InputError: the prompt cannot be used.
            PlanInfeasible: it does not fit.
        """
        ids = self._prompts.of_text(prompt) if isinstance(prompt, str) else self._prompts.of_messages(prompt)
        generator, options = self.generator, self._options
        generator.model.check_tokens(ids)
        settings = generator.model.settings(len(ids), None, self._changes)
        config = settings["generation_config"]
        before = generator.plan
        room = 0 if isinstance(prompt, str) else _LEAST_CONVERSATION
        generator.prepare_at_least(1, len(ids), config.max_new_tokens, room, kept_copies(settings))
        if plan is not None and generator.plan is not before:
            plan(generator.plan)
        rows = (tuple(ids),)
        batch = SeatRows(self._count, rows, options.seed + self._count, watched(settings, rows, write))
        self._count += 1
        (done,) = generator.run([batch])
        (answer,) = answers_of(done)
        if answer.error:
            raise ModelError(answer.error)
        if not watch_of(batch.settings).streams:
            write(answer.text)
        return answer

    @cached_property
    def _changes(self) -> dict[str, Any]:
        return changes_of(self.generator, self._options, self._tokenizer)

    def close(self) -> None:
        """Close its model."""
        self.generator.close()


def answers_of(done: Generated) -> Iterator[Answer]:
    """Yield the answers of a micro-batch's rows, which were watched."""
    watch, ends = watch_of(done.batch.settings), end_tokens(done.batch.settings["generation_config"])
    for row, (prompt, tokens) in enumerate(zip(done.batch.rows, done.tokens, strict=True)):
        found = watch.finish(row, tokens)
        stops = found.stopped or bool(tokens and tokens[-1] in ends)
        error = _NOT_FINITE.format(watch.failed[row]) if row in watch.failed else ""
        yield Answer(found.text, STOP if stops else LENGTH, len(prompt), found.count, error)


def changes_of(generator: Generator, options: GenerateOptions, tokenizer: Any) -> dict[str, Any]:
    """Return the arguments of transformers' `generate` that `options` and the tokenizer give; the model's own are tried.

    Raises:
        InputError: a setting is refused, or the assistant cannot be loaded.
    """
    changes = {**options.settings, "tokenizer": tokenizer}
    if options.assistant is not None:
        changes["assistant_model"] = open_assistant(options.assistant)
    model = generator.model
    config, _ = model.checked(None, changes)
    if config.num_return_sequences > 1:
        raise ConfigError(
            f"{model.directory / 'generation_config.json'}: num_return_sequences is {config.num_return_sequences}, but "
            "`headrace generate` answers a prompt once; remove it, or generate from Python"
        )
    return changes


def open_assistant(directory: str | Path) -> Any:
    """Return a small model that drafts tokens, all of it in memory.

    Raises:
        ModelError: it cannot be loaded.
    """
    try:
        found = model_read_from(str(directory))
    except Exception as error:  # whatever transformers raises for what a directory may hold
        raise ModelError(f"assistant: {directory}: cannot be loaded: {in_one_line(error)}") from error
    return found.eval()
