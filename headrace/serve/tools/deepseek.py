"""DeepSeek: R1 and V3 (a name, then JSON in a fence), V3.1 (a name, a mark, JSON)."""

from headrace.serve.tools.dialect import CALLS, Dialect, call, thought

_BEGIN, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_ALL, _NO_MORE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FIRST, _KIND = rf"(?:{_ALL}\s*)?{_BEGIN}", f"function{_SEPARATOR}"
_CALL = {"repeats": True, "content": "json", "transform": call()}

DEEPSEEK = Dialect(
    "deepseek",
    ((_BEGIN,),),
    {
        **thought(),
        CALLS: {
            "open_pattern": rf"{_FIRST}(?!{_KIND})(?P<name>[\w.-]+){_SEPARATOR}",
            "close": _END,
            **_CALL,
        },
        f"{CALLS}_fenced": {
            "open_pattern": rf"{_FIRST}{_KIND}(?P<name>[\w.-]+)\s*```json\n",
            "close_pattern": rf"\n```\s*{_END}",
            **_CALL,
        },
    },
    begin=_ALL + _BEGIN,
    middle=_SEPARATOR,
    end=_END + _NO_MORE,
    hidden=(_NO_MORE,),
)
