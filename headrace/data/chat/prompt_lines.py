"""Files of prompts: lines with `prompt` or `messages`, or lines of OpenAI's Batch files; the answers have the same form.

Invariant: each line of the input has one line in the output, in order; an error in a line is reported there, not raised.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.data.chat.api_bodies import conversation_of, settings_of
from headrace.data.chat.prompts import Prompts
from headrace.data.chat.request_keys import TEMPLATE_KEYS, check_keys
from headrace.terms.errors import HeadraceError

_BATCH_URL = "/v1/chat/completions"


class _Wrong(Exception):
    """An error in a line."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line: its token ids, or why it has none (`error`), and its own settings.

    `values` is the line as it came, if it could be read as a mapping.
    """

    number: int
    values: Mapping[str, Any]
    ids: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def is_batch(self) -> bool:
        """Whether it is a line of a Batch file."""
        return "custom_id" in self.values and "body" in self.values

    def answered(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line of the output for an answer: `completion`, `finish_reason`, token counts, `micro_batch`, `seed`."""
        if not self.is_batch:
            return {**self.values, **found}
        counts = found["prompt_tokens"], found["completion_tokens"]
        message = {"role": "assistant", "content": found["completion"]}
        body = {
            "object": "chat.completion",
            "model": self.values["body"].get("model"),
            "choices": [{"index": 0, "message": message, "finish_reason": found["finish_reason"]}],
            "usage": {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)},
            "micro_batch": found["micro_batch"],
            "seed": found["seed"],
        }
        whole = {"id": f"line_{self.number}", "custom_id": self.values["custom_id"]}
        return {**whole, "response": {"status_code": 200, "body": body}, "error": None}

    def refused(self, error: str) -> dict[str, Any]:
        """Return the output line that reports an error."""
        if not self.is_batch:
            return {**self.values, "error": error}
        whole = {"id": f"line_{self.number}", "custom_id": self.values["custom_id"]}
        return {**whole, "response": None, "error": {"code": "invalid_request", "message": error}}


def read_line(number: int, text: str, prompts: Prompts) -> PromptLine:
    """Return line `number` (from 1) of a file of prompts."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return PromptLine(number, {"line": number}, error=f"line {number}: not JSON ({error})")
    if not isinstance(values, dict):
        return PromptLine(number, {"line": number}, error=f"line {number}: expected an object, found {type(values).__name__}")
    try:
        is_batch = "custom_id" in values and "body" in values
        body = _batch_body(values) if is_batch else values
        ids = tuple(_ids(body, prompts))
        read = ("messages", "tools", *TEMPLATE_KEYS) if "messages" in body else ("prompt",)
        check_keys(body, read, has_columns=not is_batch)
        return PromptLine(number, values, ids, settings_of(body))
    except (_Wrong, HeadraceError) as error:
        return PromptLine(number, values, error=f"line {number}: {error}")


def _batch_body(values: Mapping[str, Any]) -> Mapping[str, Any]:
    url, body = values.get("url", _BATCH_URL), values["body"]
    if url != _BATCH_URL or not isinstance(body, dict):
        raise _Wrong(f"url is {url!r}; only {_BATCH_URL} with an object as body is answered")
    return body


def _ids(body: Mapping[str, Any], prompts: Prompts) -> list[int]:
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list) and prompt is None:
        return conversation_of(body, prompts)
    if isinstance(prompt, str) and messages is None:
        return prompts.of_text(prompt)
    raise _Wrong("expected prompt (a text) or messages (a list)")
