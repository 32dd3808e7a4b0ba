"""Gemma 4 and FunctionGemma: `call:NAME{key:value}` between marks, with marks of their own around texts."""

from typing import Any

from headrace.serve.tools.dialect import CALLS, Dialect, as_json, call, thought


def _written(value: Any) -> str:
    """Return a value as Gemma writes it: keys bare, texts between marks."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_written(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else as_json(value)


GEMMA = Dialect(
    "gemma",
    (("<|tool_call>",), ("<start_function_call>",)),
    {
        **thought("<|channel>thought\n", "<channel|>"),
        CALLS: {
            "open_pattern": r"(?:<\|tool_call>|<start_function_call>)call:(?P<name>[\w.-]+)(?=\{)",
            "close": ["<tool_call|>", "<end_function_call>"],
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>'], ["<escape>", "<escape>"]]},
            "transform": call(),
        },
    },
    begin="<|tool_call>call:",
    end="<tool_call|>",
    arguments=_written,
)
