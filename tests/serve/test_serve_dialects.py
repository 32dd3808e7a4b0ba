"""Each dialect's answers are taken apart: content, thought and calls, whole and in pieces of any size; nothing is raised.

The texts are written here as the models' own chat templates and cards show them.
"""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import sampled
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from headrace.data.chat.prompts import Prompts
from headrace.serve.tools.asking import Asking
from headrace.serve.tools.dialect import Json
from headrace.serve.tools.speech import message_of
from headrace.serve.tools.table import DIALECTS
from headrace.terms.errors import DataError, ModelError
from headrace.terms.options.serve_options import TOOL_DIALECTS

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "all": {"type": "boolean"}}}
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": CITY}} for name in ("sky", "sea")]
PARIS, ROME = ("sky", {"city": "Paris", "days": 3}), ("sea", {"city": "Rome {", "all": True})
# dialect: special tokens, an answer, its thought, its content, its calls.
CASES: dict[str, tuple[list[str], str, str | None, str | None, list[tuple[str, Json]]]] = {
    "hermes": (
        ["<|im_end|>"],
        "<think>\nIt asks.\n</think>\n\n"
        'I look.\n<tool_call>\n{"name": "sky", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "sea", "arguments": {"city": "Rome {", "all": true}}\n'
        "</tool_call><|im_end|>",
        "It asks.",
        "I look.",
        [PARIS, ROME],
    ),
    "qwen": (
        ["<|im_end|>"],
        "<tool_call>\n<function=sky>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=sea>\n<parameter=city>\nRome {\n</parameter>\n"
        "<parameter=all>\ntrue\n</parameter>\n</function>\n</tool_call><|im_end|>",
        None,
        None,
        [PARIS, ROME],
    ),
    "glm": (
        ["<|user|>"],
        "<think>It asks.</think>\n"
        "<tool_call>sky\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>sea\n<arg_key>city</arg_key>\n<arg_value>Rome {</arg_value>\n"
        "<arg_key>all</arg_key>\n<arg_value>true</arg_value>\n</tool_call><|user|>",
        "It asks.",
        None,
        [PARIS, ROME],
    ),
    "llama3": (
        ["<|eot_id|>", "<|python_tag|>"],
        '<|python_tag|>{"name": "sky", "parameters": {"city": "Paris", "days": 3}}; '
        '{"type": "function", "name": "sea", "parameters": {"city": "Rome {", "all": true}}<|eot_id|>',
        None,
        None,
        [PARIS, ROME],
    ),
    "mistral": (
        ["[TOOL_CALLS]", "</s>"],
        '[TOOL_CALLS] [{"name": "sky", "arguments": {"city": "Paris", "days": 3}, "id": "a1"}, '
        '{"name": "sea", "arguments": {"city": "Rome {", "all": true}}]</s>',
        None,
        None,
        [PARIS, ROME],
    ),
    "mistral-args": (
        ["[TOOL_CALLS]", "[ARGS]", "</s>", "[THINK]", "[/THINK]"],
        '[THINK]It asks.[/THINK]I look.[TOOL_CALLS]sky[ARGS]{"city": "Paris", "days": 3}'
        '[TOOL_CALLS]sea[ARGS]{"city": "Rome {", "all": true}</s>',
        "It asks.",
        "I look.",
        [PARIS, ROME],
    ),
    "harmony": (
        ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>"],
        "<|channel|>analysis<|message|>It asks.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant"
        '<|channel|>commentary to=functions.sky <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>'
        '<|start|>assistant to=functions.sea<|channel|>commentary json<|message|>{"city": "Rome {", "all": true}<|call|>',
        "It asks.",
        "I look.",
        [PARIS, ROME],
    ),
    "deepseek": (
        ["<｜end▁of▁sentence｜>"],
        "<think>\nIt asks.\n</think>\nI look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>sky\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>sea<｜tool▁sep｜>'
        '{"city": "Rome {", "all": true}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
        "It asks.",
        "I look.",
        [PARIS, ROME],
    ),
    "gemma": (
        ["<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>", "<|channel>", "<channel|>"],
        '<|channel>thought\nIt asks.\n<channel|>I look.<|tool_call>call:sky{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:sea{city:<|"|>Rome {<|"|>,all:true}<tool_call|><turn|>',
        "It asks.",
        "I look.",
        [PARIS, ROME],
    ),
    "think": ([], "<think>It asks.</think>\n\nI look. ", "It asks.", "I look. ", []),
}
TOLD = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if thinks %}<think>\n{% endif %}{% endif %}"
)


@cache
def asking(name: str) -> Asking:
    specials = CASES[name][0]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), additional_special_tokens=specials)
    tokenizer.chat_template = TOLD
    return Asking(Prompts(tokenizer), name)


def read(name: str, text: str, sizes: list[int], **body: Any) -> tuple[Json, list[Json]]:
    asked = {"messages": [{"role": "user", "content": "w"}], "tools": TOOLS, **body}
    make = asking(name).read(asked).speech
    assert make is not None
    speech, deltas, at = make(), list[Json](), 0
    for size in sizes:
        deltas += speech.feed(text[at : at + size])
        at += size
    deltas += [*speech.feed(text[at:]), *speech.end()]
    return message_of(deltas), deltas


def calls_of(message: Json) -> list[tuple[str, Json]]:
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in message.get("tool_calls", [])]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=st.lists(st.integers(1, 40), max_size=60))
def test_a_dialect_is_read_in_pieces_of_any_size(name: str, sizes: list[int]) -> None:
    _, text, thought, content, calls = CASES[name]
    message, deltas = read(name, text, sizes)
    assert message.get("reasoning_content") == message.get("reasoning") == thought
    assert message["content"] == content
    assert calls_of(message) == calls
    begun = [each["tool_calls"][0] for each in deltas if "tool_calls" in each]
    assert [each["index"] for each in begun if "id" in each] == list(range(len(calls)))
    assert len({each["id"] for each in begun if "id" in each}) == len(calls)


@pytest.mark.parametrize("name", [name for name, dialect in DIALECTS.items() if dialect.begin])
@given(
    city=st.text(st.characters(categories=["L", "N", "Zs"], include_characters="{}[]\"',:;.\\"), min_size=1), days=st.integers()
)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_a_dialect_writes_it_reads(name: str, city: str, days: int) -> None:
    end = "<|eot_id|>" if name == "llama3" else ""
    message, _ = read(name, DIALECTS[name].written("sky", {"city": city, "days": days}) + end, [])
    assert calls_of(message) == [("sky", {"city": city, "days": days})]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[4]])
def test_a_call_that_is_cut_or_no_json_is_content(name: str) -> None:
    specials, text, _, content, calls = CASES[name]
    at = text.rindex("Rome")
    cut, _ = read(name, text[:at], [7] * 90)
    whole = calls[:0] if name == "mistral" else calls[:1]  # a list is one call's text
    assert calls_of(cut) == whole
    shown = text[:at].rpartition("sea")[2]
    for each in specials:
        shown = shown.replace(each, "")
    assert cut["content"].startswith(content or "")
    assert cut["content"].endswith(shown)
    if DIALECTS[name].arguments.__qualname__ == "as_json":
        wrong, _ = read(name, text.replace('"Paris"', "Paris"), [5] * 90)
        assert "Paris" in wrong["content"]
        assert calls_of(wrong) == ([] if name == "mistral" else calls[1:])


@pytest.mark.parametrize("name", sampled(CASES))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_answer_is_read(name: str, data: st.DataObject) -> None:
    """Made of pieces of a right one, in any order: nothing is raised, and pieces of any size say the same."""
    text = CASES[name][1]
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 30)).map(lambda span: text[span[0] : sum(span)])
    mixed = "".join(data.draw(st.lists(spans | st.text(max_size=3), max_size=8)))
    whole, _ = read(name, mixed, [])
    pieces, _ = read(name, mixed, data.draw(st.lists(st.integers(1, 9), max_size=40)))
    assert calls_of(pieces) == calls_of(whole)
    assert pieces["content"] == whole["content"]
    assert pieces.get("reasoning") == whole.get("reasoning")


def test_a_thought_that_the_prompt_has_begun_goes_on() -> None:
    message, _ = read("hermes", "It asks.\n</think>\n\nHi.", [3], chat_template_kwargs={"thinks": True})
    assert (message["reasoning"], message["content"]) == ("It asks.", "Hi.")


@pytest.mark.parametrize(
    ("name", "thinks"),
    [*((name, False) for name, dialect in DIALECTS.items() if dialect.begin), ("hermes", True), ("qwen", True), ("glm", True)],
)
def test_a_chosen_tool_is_begun_by_the_prompt(name: str, thinks: bool) -> None:
    dialect, end = DIALECTS[name], "<|eot_id|>" if name == "llama3" else ""
    options = {"chat_template_kwargs": {"thinks": thinks}}
    for choice, rest in (("required", "sky" + dialect.middle), ({"type": "function", "function": {"name": "sky"}}, "")):
        asked = {"messages": [{"role": "user", "content": "w"}], "tools": TOOLS, "tool_choice": choice, **options}
        assert asking(name).read(asked).text.endswith((dialect.begin + ("" if rest else "sky" + dialect.middle)).rstrip())
        written = rest + dialect.arguments({"city": "Paris"}) + dialect.end + end
        message, _ = read(name, written, [4, 9], tool_choice=choice, **options)
        assert calls_of(message) == [("sky", {"city": "Paris"})]
        assert message["content"] is None


def test_other_choices_of_tools() -> None:
    _, text, thought, _, calls = CASES["hermes"]
    assert calls_of(read("hermes", text, [], parallel_tool_calls=False)[0]) == calls[:1]
    for body in ({"tool_choice": "none"}, {"tools": None}):
        plain, _ = read("hermes", text, [], **body)
        assert "tool_calls" not in plain
        assert plain["content"].count("<tool_call>") == 2
        assert plain["reasoning"] == thought
    wrong = [
        ({"tool_choice": "always"}, "auto, none, required"),
        ({"tool_choice": {"type": "function", "function": {"name": "air"}}}, "none of the tools"),
        ({"tool_choice": "required", "tools": []}, "no tools"),
        ({"parallel_tool_calls": 1}, "true or false"),
    ]
    for body, words in wrong:
        with pytest.raises(DataError, match=words):
            read("hermes", text, [], **body)


def test_the_tokenizers_own_response_template_comes_first() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    tokenizer.chat_template = TOLD + "<tool_call>"
    fields = {
        "content": {},
        "tool_calls": {"open": "[[", "close": "]]", "content": "json", "transform": {"function": "{content}"}},
    }
    tokenizer.response_template = {"start_anchor": "<a>", "fields": fields}
    asked = {"messages": [{"role": "user", "content": "[[w"}], "tools": TOOLS}
    for named, called in ((None, True), ("hermes", False)):
        make = Asking(Prompts(tokenizer), named).read(asked).speech
        assert make is not None
        speech = make()
        message = message_of([*speech.feed('a [[{"name": "sky"}]]'), *speech.end()])
        assert bool(calls_of(message)) is called
    tokenizer.response_template = {"fields": {"content": {"opens": "x"}}}
    with pytest.raises(ModelError, match="response_template"):
        Asking(Prompts(tokenizer))


def test_marks_choose_the_dialect() -> None:
    shown = {
        "hermes": "<tool_call>{...}</tool_call>",
        "qwen": "<tool_call><function=x>",
        "glm": "<tool_call>{name}<arg_key>",
        "llama3": '<|start_header_id|> {"name": n, "parameters": p}',
        "mistral": "[TOOL_CALLS] [",
        "mistral-args": "[TOOL_CALLS]name[ARGS]",
        "harmony": "<|start|>assistant<|channel|>final<|message|>",
        "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "gemma": "<|tool_call>call:",
        "think": "content.split('</think>')",
    }
    assert set(shown) == set(CASES) == set(DIALECTS) == set(TOOL_DIALECTS)
    for name, words in shown.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
        tokenizer.chat_template = f"{{# {words} #}}{TOLD}"
        found = Asking(Prompts(tokenizer)).dialect
        assert found is not None
        assert found.name == name
