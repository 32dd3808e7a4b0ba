"""gpt-oss: channels. Analysis is the thought, final (or commentary to nobody) the answer, a recipient makes it a call."""

from headrace.serve.tools.dialect import CALLS, Dialect, call

_TO = r" ?to=functions\.(?P<name>[\w.-]+)"

HARMONY = Dialect(
    "harmony",
    (("<|channel|>", "<|message|>"),),
    {
        "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": ["<|end|>", "<|return|>"], "content": "text"},
        CALLS: {
            "open_pattern": rf"(?:<\|channel\|>\w+)?{_TO}(?:<\|channel\|>\w+)?\s*(?:<\|constrain\|>)?(?:json)?<\|message\|>",
            "close": ["<|call|>", "<|end|>"],
            "repeats": True,
            "content": "json",
            "transform": call(),
        },
    },
    begin="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    end="<|call|>",
    content={
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)(?:\s*<\|constrain\|>\w+)?<\|message\|>",
            "close": ["<|return|>", "<|end|>"],
            "content": "text",
        }
    },
)
