"""The part of docs/trainer.md that is generated: `python tests/integrations/trainer_tables.py` writes it anew."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.integrations.transformers import arguments

PAGE = Path(__file__).parents[2] / "docs" / "trainer.md"
BEGIN, END = "<!-- generated: tests/integrations/trainer_tables.py -->\n", "<!-- end -->\n"


def tables() -> str:
    """Return the tables of what is honoured, ignored and refused."""
    parts = [
        "### TrainingArguments\n\n",
        _honoured(arguments.HONOURED),
        _table("ignored", arguments.IGNORED),
        _table("refused", arguments.REFUSED),
        "### SFTConfig of TRL, besides\n\n",
        _honoured(arguments.SFT_HONOURED),
        _table("ignored", arguments.SFT_IGNORED),
        _table("refused", arguments.SFT_REFUSED),
        "### Arguments of Trainer\n\n",
        _honoured(arguments.ARGUMENTS_HONOURED),
        _table("refused", arguments.ARGUMENTS_REFUSED),
        "### Methods that a subclass overrides\n\n",
        _honoured(arguments.METHODS_HONOURED),
        _table("refused", arguments.METHODS_REFUSED),
    ]
    return "".join(parts)


def _honoured(names: Iterable[str]) -> str:
    """Return a list of names, six an item: a sentence has no more than thirty words."""
    words = [f"`{name}`" for name in sorted(names)]
    items = (f"- {', '.join(words[start : start + 6])}" for start in range(0, len(words), 6))
    return "Honoured:\n\n" + "\n".join(items) + "\n\n"


def _table(what: str, rows: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in rows.items():
        by_reason.setdefault(why, []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {why} |" for why, names in by_reason.items()]
    return "\n".join([f"| {what} | why, or what to do |", "|---|---|", *lines]) + "\n\n"


def page_with(text: str) -> str:
    """Return the page with `text` in its generated part."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(tables()), encoding="utf-8")
