"""Hermes and Qwen up to 3: a JSON object with name and arguments between `<tool_call>` tags."""

from headrace.serve.tools.dialect import CALLS, Dialect, thought

_CALL = {"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"}

HERMES = Dialect(
    "hermes",
    (("<tool_call>",),),
    {**thought(), CALLS: {**_CALL, "transform": {"type": "function", "function": "{content}"}}},
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    end="}\n</tool_call>",
)
