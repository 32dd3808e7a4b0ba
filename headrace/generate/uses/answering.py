"""Generation as a user sees it: one prompt whose answer is printed as it comes, or a conversation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import TextStreamer

from headrace.data.batches.open_data import open_tokenizer
from headrace.data.chat.prompts import Messages, Prompts, answer_of
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, MicroBatch, kept_copies
from headrace.generate.passes.opened import end_tokens
from headrace.model.blocks.building import model_read_from
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, ModelError, in_one_line
from headrace.terms.events import Sink
from headrace.terms.options.generate_options import GenerateOptions

# A conversation is planned for at least so many tokens, so that not each of its turns needs other buffers.
_LEAST_CONVERSATION = 1024


class Printer(TextStreamer):  # type: ignore[misc]
    """Gives the text of one answer, piece by piece, to `write`, without special tokens and without the text that stops it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._stops, self._write = tuple(stops), write
        self._longest = max(map(len, stops), default=1) - 1
        self._held, self._stopped = "", False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Take the next piece."""
        if self._stopped:
            return
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._held, self._stopped = self._held[: min(places)], True
        # Text that may be the beginning of a stopping text is held back.
        keep = 0 if stream_end or self._stopped else self._longest
        ready = self._held[: len(self._held) - keep] if keep else self._held
        self._held = self._held[len(ready) :]
        if ready:
            self._write(ready)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its text, why it ends (`stop` or `length`), and the numbers of tokens."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


class Talk(Closing):
    """A model that answers prompts one after the other. Use as a context manager."""

    def __init__(self, generator: Generator, options: GenerateOptions, sink: Sink | None = None) -> None:
        self.generator, self._options, self._sink = generator, options, sink
        self._tokenizer = open_tokenizer(generator.model.directory, generator.model.chat_template)
        day = options.template_date or generator.model.template_date
        self._prompts = Prompts(self._tokenizer, options.raw, options.system, day)
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
        stops = list(config.stop_strings or ())
        printer = Printer(self._tokenizer, stops, write)
        streams = (config.num_beams or 1) == 1
        if streams:
            settings["streamer"] = printer
        batch = MicroBatch(self._count, (tuple(ids),), options.seed + self._count, settings)
        self._count += 1
        (done,) = generator.run([batch])
        answer = _answer(self._tokenizer, done, 0)
        if not streams:
            write(answer.text)
        return answer

    @cached_property
    def _changes(self) -> dict[str, Any]:
        return changes_of(self.generator, self._options, self._tokenizer)

    def close(self) -> None:
        """Close its model."""
        self.generator.close()


def _answer(tokenizer: Any, done: Generated, row: int) -> Answer:
    config = done.batch.settings["generation_config"]
    tokens = done.tokens[row]
    text, reason = answer_of(tokenizer, tokens, end_tokens(config), list(config.stop_strings or ()))
    return Answer(text, reason, len(done.batch.rows[row]), len(tokens))


def answers_of(tokenizer: Any, done: Generated) -> Iterator[Answer]:
    """Yield the answers of a micro-batch's rows."""
    for row in range(len(done.tokens)):
        yield _answer(tokenizer, done, row)


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
