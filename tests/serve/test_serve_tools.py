"""Tools and thoughts by the real client: calls and thoughts come whole and streamed; what cannot be is refused by name.

The words of the model are given: logits are those of a script, all else is the server's own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from served import Server, serving
from talking_model import TEMPLATE, save_talking_model
from transformers import AutoTokenizer

from headrace.data.chat.prompts import Prompts
from headrace.generate.uses import watching
from headrace.serve import rendering
from headrace.serve.rendering import in_time
from headrace.serve.tools.asking import Asking
from headrace.terms.errors import DataError

CHATS = "/v1/chat/completions"
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "sky", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "w"}], "tools": TOOLS, "temperature": 0}
SAID = '<think>\nIt asks.\n</think>\n\nI look.\n<tool_call>\n{"name": "sky", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_model(tmp_path_factory.mktemp("tools") / "tiny", positions=2048)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serving(model, max_length=2048, tool_dialect="hermes") as found:
        yield found


@pytest.fixture
def says(model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what gives the model its words."""
    tokenizer, own = AutoTokenizer.from_pretrained(model), watching._Finite.__call__

    def say(text: str) -> None:
        words = [*tokenizer(text).input_ids, tokenizer.eos_token_id]

        def forced(self: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            word = words[min(ids.shape[1] - self._watch._length, len(words) - 1)]
            return own(self, ids, torch.full_like(scores, -100.0).index_fill(1, torch.tensor([word]), 0.0))

        monkeypatch.setattr(watching._Finite, "__call__", forced)

    return say


def streamed(server: Server, **asked: Any) -> tuple[dict[str, Any], str | None]:
    """Return the message that a stream's deltas make, put together as clients do, and why it ends."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    reason = None
    for event in server.client.chat.completions.create(**asked, stream=True):
        delta, reason = event.choices[0].delta, event.choices[0].finish_reason
        found["content"] += delta.content or ""
        found["reasoning"] += getattr(delta, "reasoning", None) or ""
        assert getattr(delta, "reasoning_content", None) == getattr(delta, "reasoning", None)
        for call in delta.tool_calls or []:
            if call.id:
                assert call.type == "function"
                found["calls"].append([call.function.name, ""])
            found["calls"][call.index][1] += call.function.arguments
    return found, reason


def test_a_thought_and_a_call_come_whole_and_streamed(server: Server, says: Any) -> None:
    says(SAID)
    choice = server.client.chat.completions.create(**ASKED, max_tokens=300).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning == choice.message.reasoning_content == "It asks."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "sky", {"city": "Paris"})
    pieces, reason = streamed(server, **ASKED, max_tokens=300)
    assert pieces == {"content": "I look.", "reasoning": "It asks.", "calls": [["sky", call.function.arguments]]}
    assert reason == "tool_calls"


@pytest.mark.parametrize(("said", "most", "reason"), [(SAID, 90, "length"), (SAID.replace('"city"', "city"), 300, "stop")])
def test_a_call_that_cannot_be_read_is_content(server: Server, says: Any, said: str, most: int, reason: str) -> None:
    says(said)
    choice = server.client.chat.completions.create(**ASKED, max_tokens=most).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == (reason, None)
    assert choice.message.content.startswith('I look.\n<tool_call>\n{"name": ')
    assert said.split("</think>\n\n")[1].startswith(choice.message.content)
    pieces, its_reason = streamed(server, **ASKED, max_tokens=most)
    assert (pieces["content"], its_reason) == (choice.message.content, reason)


def test_a_chosen_tool_is_called(server: Server, says: Any) -> None:
    says('{"city": "Rome"}}\n</tool_call>')
    choice: Any = {"type": "function", "function": {"name": "sky"}}
    (found,) = server.client.chat.completions.create(**ASKED, tool_choice=choice).choices[0].message.tool_calls
    assert (found.function.name, json.loads(found.function.arguments)) == ("sky", {"city": "Rome"})


def test_a_turn_after_a_call_is_read(server: Server, says: Any) -> None:
    """A client sends back what it was sent: contents of null, thoughts by either name, arguments as text."""
    says("Sunny.")
    call = {"id": "c", "type": "function", "function": {"name": "sky", "arguments": '{"city": "Paris"}'}}
    said: Any = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "w"},
        {"role": "assistant", "content": None, "reasoning": "It asks.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
    ]
    found = server.client.chat.completions.create(**{**ASKED, "messages": said})
    assert found.choices[0].message.content == "Sunny."


def test_a_history_of_calls_is_rendered(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    call = {"id": "c", "type": "function", "function": {"name": "sky", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "w"}]},
        {"role": "assistant", "content": None, "reasoning": "It asks.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sun"},
    ]
    body = {"messages": messages, "tools": TOOLS}
    text = Asking(Prompts(tokenizer), "hermes").read(body).text
    assert text.startswith("<system>Be short.\n\nYou may call")
    assert json.dumps(TOOLS[0]) in text
    called = '<assistant><tool_call>\n{"name": "sky", "arguments": {"city": "Paris"}}\n</tool_call><eos>'
    assert text.endswith(f"<user>w<eos>{called}<user><tool_response>\nsun\n</tool_response><eos><a>")
    # A template of its own gets objects, a content that it can join, and the thought.
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
    )
    assert Asking(Prompts(tokenizer)).read(body).text == ("sky;<system>Be short.<user>w<assistant>It asks.city=Paris<tool>sun")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a choice that is none": ({"tool_choice": "always"}, "auto, none, required"),
    "a tool that is none": ({"tool_choice": {"type": "function", "function": {"name": "sea"}}}, "none of the tools"),
    "a call that is none": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls must have"),
    **{
        f"a template's {name}": ({"chat_template_kwargs": {name: "{{ 1 }}"}}, name)
        for name in (
            "chat_template",
            "messages",
            "tools",
            "tokenize",
            "add_generation_prompt",
            "documents",
            "conversation",
            "self",
        )
    },
    "variables that are none": ({"chat_template_kwargs": ["thinks"]}, "must be an object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(server: Server, name: str) -> None:
    change, words = REFUSED[name]
    with pytest.raises(openai.BadRequestError, match=words):
        server.client.chat.completions.create(
            **{**ASKED, "extra_body": change, **({"messages": change["messages"]} if "messages" in change else {})}
        )


def test_tools_that_the_model_is_not_told_of_are_refused(model: Path) -> None:
    asking = Asking(Prompts(AutoTokenizer.from_pretrained(model)))
    with pytest.raises(DataError, match="--tool-dialect"):
        asking.read({"messages": ASKED["messages"], "tools": TOOLS})


def test_variables_reach_the_template(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE + "{{ enable_thinking }}{{ reasoning_effort }}{{ a }}"
    asking = Asking(Prompts(tokenizer, options={"a": 1, "enable_thinking": True}))
    body = {"messages": ASKED["messages"], "enable_thinking": False, "chat_template_kwargs": {"reasoning_effort": "low"}}
    assert asking.read(body).text.endswith("<a>Falselow1")


def test_a_template_without_end_is_ended(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is first tried, and the thread goes on after it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loop = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(rendering, "RENDER_SECONDS", 0.2)
    for template in (TEMPLATE + loop, "{% if messages[0].content is not string %}" + loop + "{% endif %}" + TEMPLATE):
        tokenizer.chat_template = template
        asking = Asking(Prompts(tokenizer))
        content = "w" if template.startswith(TEMPLATE) else [{"type": "text", "text": "w"}]
        with pytest.raises(DataError, match="seconds"), in_time(0.2):
            asking.read({"messages": [{"role": "user", "content": content}]})
    with in_time(100):
        assert sum(range(10)) == 45
