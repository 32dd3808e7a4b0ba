"""The generated part of docs/trainer.md: `PYTHONPATH=tests python tests/integrations/trainer_tables.py` writes it anew."""

from collections.abc import Mapping

from pages import renew

from headrace.integrations.transformers import arguments

PAGE, SCRIPT = "trainer.md", "tests/integrations/trainer_tables.py"


def tables() -> str:
    """Return the tables of what is ignored and refused."""
    parts = [
        "\n### TrainingArguments\n\n",
        _table("ignored", arguments.IGNORED),
        _table("refused", arguments.REFUSED),
        "### SFTConfig of TRL, besides\n\n",
        _table("ignored", arguments.SFT_IGNORED),
        _table("refused", arguments.SFT_REFUSED),
        "### Arguments of Trainer\n\n",
        _table("refused", arguments.ARGUMENTS_REFUSED),
        "### Methods that a subclass overrides\n\n",
        _table("refused", arguments.METHODS_REFUSED),
    ]
    return "".join(parts)


def _table(what: str, rows: Mapping[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, why in rows.items():
        by_reason.setdefault(why, []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {why} |" for why, names in by_reason.items()]
    return "\n".join([f"| {what} | why, or what to do |", "|---|---|", *lines]) + "\n\n"


if __name__ == "__main__":
    renew(PAGE, SCRIPT, tables())
