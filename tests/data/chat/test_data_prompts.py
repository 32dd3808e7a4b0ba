"""Prompts go through the same forms as training data. Run: pytest tests/data/chat/test_data_prompts.py"""

import json

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from conversations import call, said, turns

from headrace.data.chat.prompt_lines import read_line
from headrace.data.chat.prompts import Prompts
from headrace.terms.errors import DataError


def text_of(template, messages):
    tokenizer = tokenizer_of(TEMPLATES[template])
    return tokenizer.decode(Prompts(tokenizer).of_messages(messages))


@pytest.mark.parametrize("template", ["chatml", "llama3", "gemma", "qwen3", "glm"])
def test_parts_of_text_are_the_prompt_that_their_text_is(template):
    parts = [said("user", [{"type": "text", "text": "w0a w0b"}])]
    assert text_of(template, parts) == text_of(template, turns("u"))
    assert "w0a w0b" in text_of(template, parts)


def test_arguments_as_text_and_flags_are_as_in_training():
    flagged = [*turns("u"), said("assistant", "", tool_calls=[call(1, text=True)], weight=0), *turns("uat")[2:]]
    plain = [*turns("u"), said("assistant", "", tool_calls=[call(1)]), *turns("uat")[2:]]
    assert text_of("llama3", flagged) == text_of("llama3", plain)


@pytest.mark.parametrize("template", ["llama3", "gemma"])
def test_a_picture_is_an_error_of_its_line(template):
    messages = [said("user", [{"type": "image_url", "image_url": {"url": "x.png"}}])]
    prompts = Prompts(tokenizer_of(TEMPLATES[template]))
    with pytest.raises(DataError, match=r"messages\[0\] has a part of type 'image_url'; only text is read"):
        prompts.of_messages(messages)
    line = read_line(1, json.dumps({"messages": messages}), prompts)
    assert "'image_url'" in line.error
