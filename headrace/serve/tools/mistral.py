"""Mistral: a list of calls as JSON behind `[TOOL_CALLS]`, or, since 2025, a name, `[ARGS]` and the arguments for each."""

from headrace.serve.tools.dialect import CALLS, Dialect, call, thought

_LIST = {
    CALLS: {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?=\[)",
        "close": "</s>",
        "content": "json",
        "transform": call("{arguments}"),
        "transform_each": True,
    }
}
_NAMED = {
    f"{CALLS}_named": {
        "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
        "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
        "repeats": True,
        "content": "json",
        "transform": call(),
    }
}
_FIELDS = {**thought("[THINK]", "[/THINK]"), **_LIST, **_NAMED}

MISTRAL_ARGS = Dialect(
    "mistral-args", (("[TOOL_CALLS]", "[ARGS]"),), _FIELDS, begin="[TOOL_CALLS]", middle="[ARGS]", end="</s>"
)
MISTRAL = Dialect(
    "mistral", (("[TOOL_CALLS]",),), _FIELDS, begin='[TOOL_CALLS][{"name": "', middle='", "arguments": ', end="}]</s>"
)
