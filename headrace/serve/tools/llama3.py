"""Llama 3.1 and later: a JSON object with name and parameters, alone or behind `<|python_tag|>`; several have `;` between."""

from headrace.serve.tools.dialect import CALLS, Dialect, call

_OPEN = (
    r'(?:<\|python_tag\|>\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\n]+)"\s*,\s*"parameters"\s*:'
)

LLAMA3 = Dialect(
    "llama3",
    (("<|start_header_id|>", '"parameters"'),),
    {
        CALLS: {
            "open_pattern": _OPEN,
            "close_pattern": r"\}\s*(?:;\s*|<\|eo[mt]_id\|>)",
            "repeats": True,
            "content": "json",
            "transform": call(),
        }
    },
    begin='{"name": "',
    middle='", "parameters": ',
    end="}",
)
