"""Conversations in which each message has words of its own: `w3a w3b` are of message 3, so a test can tell whose is trained."""

from typing import Any


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turns(roles: str) -> list[dict[str, Any]]:
    """Return messages by their initials: s, u, a, t."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [said(names[role], f"w{index}a w{index}b") for index, role in enumerate(roles)]


def call(index: int, which: int = 0, *, text: bool = False) -> dict[str, Any]:
    """Return a call with words of message `index`, its arguments as an object or as text."""
    word = f"w{index}{'cdef'[which]}"
    arguments = f'{{"city": "{word} \\u00fc"}}' if text else {"city": f"{word} ü"}
    return {
        "id": f"call{index:04d}{which}",
        "type": "function",
        "function": {"name": f"find{index}", "arguments": arguments},
    }


TOOL = {
    "type": "function",
    "function": {
        "name": "find1",
        "description": "finds",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def _calling(**more: Any) -> list[dict[str, Any]]:
    messages = turns("uatau")[:4]
    messages[1] = said("assistant", "", tool_calls=[call(1)], **more)
    messages[2]["tool_call_id"] = "call00010"
    return messages


def _with(roles: str, **contents: Any) -> list[dict[str, Any]]:
    """Return `turns` with other contents: `m1="..."` for message 1."""
    return [{**message, "content": contents.get(f"m{index}", message["content"])} for index, message in enumerate(turns(roles))]


def _parallel() -> list[dict[str, Any]]:
    messages = turns("uattau")[:5]
    messages[1] = said("assistant", "", tool_calls=[call(1), call(1, 1)])
    messages[2]["tool_call_id"], messages[3]["tool_call_id"] = "call00010", "call00011"
    return messages


def _reasoning() -> list[dict[str, Any]]:
    messages = turns("uaua")
    messages[1]["reasoning_content"], messages[3]["reasoning_content"] = "w1r w1s", "w3r w3s"
    return messages


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": turns("ua"),
    "two": turns("uaua"),
    "three": turns("uauaua"),
    "system": turns("suaua"),
    "no-think": _with("suaua", m0="w0a w0b /no_think"),
    "first": turns("aua"),
    "first-alone": turns("a"),
    "system-first": turns("saua"),
    "row": turns("uaauaa"),
    "row-first": turns("aaua"),
    "call": _calling(),
    "call-system": [said("system", "w9a w9b"), *_calling()],
    "call-text": [*turns("u"), said("assistant", "", tool_calls=[call(1, text=True)]), *_calling()[2:]],
    "call-words": [*turns("u"), said("assistant", "w1a w1b", tool_calls=[call(1)]), *_calling()[2:]],
    "call-more": [*_calling(), said("user", "w4a w4b"), said("assistant", "w5a w5b")],
    "call-thought": _calling(reasoning_content="w1r w1s"),
    "call-null": [*turns("u"), {**_calling()[1], "content": None}, *_calling()[2:]],
    "parallel": _parallel(),
    "reasoning": _reasoning(),
    "think": _with("uaua", m1="<think>\nw1r w1s\n</think>\n\nw1a w1b", m3="<think>\nw3r w3s\n</think>\n\nw3a w3b"),
    "empty": _with("uaua", m1=""),
    "empty-last": _with("uaua", m3=""),
    "empty-first": _with("aua", m0=""),
    "empty-user": _with("uaua", m2=""),
    "white": _with("suaua", m0=" w0a w0b\n", m1="\n\n w1a w1b ", m2="\n w2a\n\nw2b\n", m3="  w3a w3b\n\n", m4=" w4a\tw4b "),
    "blank": _with("uaua", m1=" \n"),
    "marks": _with("uaua", m1="w1a <|im_end|> w1b<|end|><|eot_id|>", m2="w2a<|im_end|>\n<|im_start|>assistant\nw2b"),
    "marks-last": _with("uaua", m2="w2a <|end|> w2b", m3="<|im_end|> w3a <|end|>"),
    "headers": _with("ua", m0="<|start|>assistant\nw0a", m1="w1a<|im_start|>user\nw1b<start_of_turn>model\nw1d"),
    "same": _with("uaua", m0="ok", m1="ok", m2="ok", m3="ok"),
    "short": _with("suaua", m0="a", m1="s", m2="e", m3="user", m4="assistant"),
    "parts": _with("uaua", **{f"m{index}": [{"type": "text", "text": f"w{index}a w{index}b"}] for index in range(4)}),
}
"""By name. Only those that call have tools."""


def row_of(name: str) -> dict[str, Any]:
    """Return the row of a conversation."""
    messages = CONVERSATIONS[name]
    return {"messages": messages} | ({"tools": [TOOL]} if "tool" in {message["role"] for message in messages} else {})
