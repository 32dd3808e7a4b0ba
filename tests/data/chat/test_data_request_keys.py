"""Keys of requests and of lines of prompts: computed, without effect, or refused."""

import json

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from conversations import turns

from headrace.data.chat.prompt_lines import PromptLine, read_line
from headrace.data.chat.prompts import Prompts
from headrace.data.chat.request_keys import NEUTRAL, OFF, WITHOUT_EFFECT

PROMPTS = Prompts(tokenizer_of(TEMPLATES["chatml"]))
TALK = {"messages": turns("u")}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
]
EACH = [(key, value) for key, values in NEUTRAL.items() for value in (None, *values)]
# Values of keys with which another answer is asked for.
OTHERS = {
    "n": 2,
    "best_of": 2,
    "logprobs": 1,
    "top_logprobs": 3,
    "echo": True,
    "suffix": "x",
    "stream": True,
    "frequency_penalty": 0.5,
    "presence_penalty": -1,
    "logit_bias": {"5": 1},
    "min_tokens": 3,
    "do_sample": False,
    "num_beams": 4,
    "response_format": {"type": "json_object"},
    "skip_special_tokens": False,
    "tool_choice": "required",
    "parallel_tool_calls": "x",
    "add_generation_prompt": False,
    "system": "Be short.",
    "raw": True,
    "functions": [{}],
    "max_length": 9,
    "prompt": "w",
}


def read(body: dict, *, batch: bool = False) -> PromptLine:
    return read_line(1, json.dumps({"custom_id": "a", "body": body} if batch else body), PROMPTS)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(("key", "value"), EACH)
def test_a_neutral_value_changes_nothing(key: str, value: object, batch: bool) -> None:
    found = read({**TALK, "temperature": 0.5, key: value}, batch=batch)
    plain = read({**TALK, "temperature": 0.5}, batch=batch)
    assert not found.error
    assert found.ids == plain.ids
    off = {key: None} if key in OFF and value is not None else {}
    assert found.settings == {**plain.settings, **off}, "it wins over the model's own, as a value that is computed does"


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize(("key", "value"), OTHERS.items())
def test_another_value_is_refused_by_name(key: str, value: object, batch: bool) -> None:
    error = read({**TALK, key: value}, batch=batch).error
    assert key in error or (key == "prompt" and "messages" in error)


def test_variables_of_the_template_are_taken_and_arguments_of_its_rendering_refused() -> None:
    for batch in (False, True):
        assert not read({**TALK, "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}, batch=batch).error
        error = read({**TALK, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, batch=batch).error
        assert "chat_template is no variable" in error


def test_what_follows_from_other_keys() -> None:
    for batch in (False, True):
        assert not read({**TALK, "parallel_tool_calls": False, "add_special_tokens": False}, batch=batch).error
        assert not read({**TALK, "tools": TOOLS, "parallel_tool_calls": True, "tool_choice": "auto"}, batch=batch).error
        assert "parallel_tool_calls" in read({**TALK, "tools": TOOLS, "parallel_tool_calls": False}, batch=batch).error
        assert "add_special_tokens" in read({**TALK, "add_special_tokens": True}, batch=batch).error
    assert not read({"prompt": "w", "add_special_tokens": True}).error
    assert "tools stand beside messages" in read({"prompt": "w", "tools": TOOLS}).error


def test_most_tokens_count_by_each_name_and_two_that_differ_are_refused() -> None:
    for key in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        assert read({**TALK, key: 5}).settings == {"max_new_tokens": 5}
    assert read({**TALK, "max_tokens": 5, "max_completion_tokens": 5}).settings == {"max_new_tokens": 5}
    assert "leave one of them out" in read({**TALK, "max_tokens": 5, "max_completion_tokens": 6}).error


def test_a_line_keeps_columns_and_a_body_has_none() -> None:
    assert not read({**TALK, "topic": "rivers", "id": 7}).error
    assert "topic" in read({**TALK, "topic": "rivers"}, batch=True).error
    for key in WITHOUT_EFFECT:
        assert not read({**TALK, key: "x"}, batch=True).error
