"""Help in sections: options by the group that their declaration names, commands by purpose.

A section is Typer's `rich_help_panel`, printed here without rich, which takes longer to import than the rest of the help.
"""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from headrace.terms.options.declared import Group

# What `headrace --help` shows, in this order.
TRAIN, USE, SHRINK, PLAN = "Train", "Run a model", "Make a model smaller", "Plan and measure"
CLUSTER, TIDY = "Several machines", "Tidy up"
COMMANDS = (TRAIN, USE, SHRINK, PLAN, CLUSTER, TIDY)
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class SectionedCommand(TyperCommand):
    """A command whose `--help` has its options in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write_parameters(self.get_params(ctx), ctx, formatter)


class SectionedGroup(TyperGroup):
    """A command of commands, which its `--help` has in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        known = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        shown = [(name, command) for name, command in known if command is not None and not command.hidden]
        limit = formatter.width - 6 - max((len(name) for name, _ in shown), default=0)
        _write(
            formatter,
            COMMANDS,
            (
                (getattr(command, "rich_help_panel", None) or "Commands", (name, command.get_short_help_str(limit)))
                for name, command in shown
            ),
        )
        _write_parameters(self.get_params(ctx), ctx, formatter)


def _write_parameters(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    rows = []
    for each in parameters:
        record = each.get_help_record(ctx)
        if record is not None:
            is_argument = each.param_type_name == "argument"
            rows.append(("Arguments" if is_argument else getattr(each, "rich_help_panel", None) or Group.OTHER, record))
    only_help = len({section for section, _ in rows} - {"Arguments"}) == 1
    _write(
        formatter,
        ("Arguments", *Group),
        (("Options" if only_help and section != "Arguments" else section, record) for section, record in rows),
    )


def _write(formatter: Any, order: Iterable[str], rows: Iterable[tuple[str, tuple[str, str]]]) -> None:
    """Write rows under their sections: those of `order` first, then others as they come."""
    sections: dict[str, list[tuple[str, str]]] = {str(name): [] for name in order}
    for section, row in rows:
        sections.setdefault(str(section), []).append(row)
    for name, members in sections.items():
        if members:
            with formatter.section(name):
                formatter.write_dl(members)
