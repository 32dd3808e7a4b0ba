"""GLM 4.5 and later: the name, then a tag for each key and one for its value."""

from headrace.serve.tools.dialect import CALLS, Dialect, call, tagged, thought

GLM = Dialect(
    "glm",
    (("<tool_call>", "<arg_key>"),),
    {
        **thought(),
        CALLS: {
            "open_pattern": r"<tool_call>\s*(?P<name>[^\s<]+)\s*(?=<)",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"},
            "transform": call(),
        },
    },
    begin="<tool_call>",
    middle="\n",
    end="</tool_call>",
    arguments=tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
