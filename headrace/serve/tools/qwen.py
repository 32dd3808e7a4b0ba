"""Qwen3-Coder, Qwen 3.5 and later: a tag for the function, and one for each parameter."""

from headrace.serve.tools.dialect import CALLS, Dialect, call, tagged, thought

QWEN = Dialect(
    "qwen",
    (("<tool_call>", "<function="),),
    {
        **thought(),
        CALLS: {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": call(),
        },
    },
    begin="<tool_call>\n<function=",
    middle=">\n",
    end="</function>\n</tool_call>",
    arguments=tagged("<parameter=", ">\n", "\n</parameter>\n"),
)
