"""Prompts to tokens: texts, and conversations by the tokenizer's chat template.

Invariant: a prompt is tokenised as in transformers' own examples: the template brings its own marks, so none is added twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from headrace.data.chat.chat_template import Template
from headrace.data.values.bounded import tokenize
from headrace.data.values.messages import read_messages, read_tools, whole_text
from headrace.terms.errors import DataError, ModelError

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prompts:
    """Makes token ids of prompts with a tokenizer. `raw`: text is taken as it is; `system` opens conversations without one;
    `options` are variables of the chat template.

    A chat template that asks for the time gets the beginning of `day` (YYYY-MM-DD); None: it gets the time.
    """

    tokenizer: Any
    raw: bool = False
    system: str | None = None
    day: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def of_text(self, text: str) -> list[int]:
        """Return the ids of a text. If the tokenizer has a chat template, it is what a user says, unless `raw`.

        Raises:
            DataError: the text has no tokens, or the template refuses it.
            ModelError: there is a system message, but no template that says where it goes.
        """
        if not self.raw and self.tokenizer.chat_template:
            return self.of_messages([{"role": "user", "content": text}])
        if self.system is not None:
            raise ModelError(
                "system: the tokenizer has no chat template, or prompts are taken raw; write the system message into the prompt"
            )
        return self._ids(text)

    def of_messages(self, messages: Messages, tools: Any = None, **how: Any) -> list[int]:
        """Return the ids of a conversation; arguments and errors are those of `rendered`."""
        return self.of_rendered(self.rendered(messages, tools, **how))

    def of_rendered(self, text: str) -> list[int]:
        """Return the ids of what the template made.

        Raises:
            DataError: it has no tokens.
        """
        return self._ids(text, add_special_tokens=False)

    def rendered(
        self,
        messages: Messages,
        tools: Any = None,
        *,
        opened: bool = False,
        prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, with the opening of the assistant's turn unless `prompt` is False; the template
        renders `tools`. If the last message is `opened`, it is the assistant's, and its turn does not end.

        Raises:
            ModelError: the tokenizer has no chat template.
            DataError: the template refuses the conversation or an option, a message has a picture, a sound or a video, or tools
                are no list.
        """
        if not self.tokenizer.chat_template:
            raise ModelError(
                "the prompt is a conversation, but the tokenizer has no chat template. Use the tokenizer of an instruct "
                "model, add a chat_template.jinja to its directory, or give the prompt as text with --raw"
            )
        whole = list(messages)
        if self.system is not None and not (whole and whole[0].get("role") == "system"):
            whole.insert(0, {"role": "system", "content": self.system})
        read = read_messages("the prompt", whole, "messages").messages
        given, tools, template = self.template.given(read), read_tools("the prompt", tools), self.template
        variables = {**self.options, **(options or {})}
        return template.render(given, tools, prompt=prompt and not opened, opened=opened, variables=variables)

    def to_answer(self, messages: Any) -> list[int]:
        """Return the ids of a conversation that is to be answered: what the assistant said last, the answer goes on with.

        Raises:
            As `of_messages`; or it is no list of messages.
        """
        said = read_messages("the prompt", messages, "prompt").messages
        return self.of_messages(said, opened=said[-1]["role"] == "assistant")

    def _ids(self, text: str, **options: Any) -> list[int]:
        (tokens,) = tokenize([whole_text("the prompt", text)], self.tokenizer, len(text), **options)
        return _some(tokens.ids)

    @cached_property
    def template(self) -> Template:
        """The tokenizer's chat template."""
        return Template.of(self.tokenizer, self.day)


def _some(ids: list[int]) -> list[int]:
    if not ids:
        raise DataError("the prompt is empty: it has no tokens; give a text")
    return ids
