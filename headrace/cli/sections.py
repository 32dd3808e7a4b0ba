"""Commands and their help: options come from their declarations, and stand in sections, as commands do.

A section is Typer's `rich_help_panel`, printed here without rich, which takes longer to import than the rest of the help.
Typer makes all options of all commands before it looks at the words, which would take a fifth of `headrace --help`. So the
command that is asked for is built alone: of the others, help shows no more than name and purpose.
Invariant: no option is known here; names, types and help come from the classes of options in `terms/`.
"""

import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_name
from typer.models import CommandInfo

from headrace.terms.options.declared import Declaration, Group

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Where a shell asks for completions, it has the words in the environment.
COMPLETING = "_HEADRACE_COMPLETE"
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


def asked_of(app: typer.Typer, words: Sequence[str]) -> typer.Typer:
    """Return `app` with the options of the command that `words` ask for; `app` itself is as it was."""
    if COMPLETING in os.environ:
        return app
    alone = copy.copy(app)
    alone.registered_commands = [
        each if _name(each) == next(iter(words), None) else _without_options(each) for each in app.registered_commands
    ]
    return alone


def _name(command: CommandInfo) -> str:
    assert command.callback is not None, "a command calls something"
    return command.name or get_command_name(command.callback.__name__)


def _without_options(command: CommandInfo) -> CommandInfo:
    shown = copy.copy(command)
    shown.name, shown.help, shown.callback = _name(command), command.help or inspect.getdoc(command.callback), _not_asked
    return shown


def _not_asked() -> None:
    """Stand in for a command that is not called."""


def with_options(declarations: Iterable[Declaration]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that puts options in the place of a command's `**given`; that then has the options that were given."""
    options = [_parameter(each) for each in declarations if each.flag is not None]
    names = {option.name for option in options}

    def decorate(command: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(command)
        def run(*arguments: _P.args, **values: _P.kwargs) -> _R:
            absent = [name for name in names if values.get(name) in (None, [], ())]
            for name in absent:
                values.pop(name, None)
            return command(*arguments, **values)

        own = list(inspect.signature(command).parameters.values())
        given = next(each for each in own if each.kind is each.VAR_KEYWORD)
        own.remove(given)
        last = [each for each in own if each.kind is each.KEYWORD_ONLY]
        parameters = [*(each for each in own if each not in last), *options, *last]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _parameter(declaration: Declaration) -> inspect.Parameter:
    said = typer.Option(help=declaration.command_help, rich_help_panel=declaration.section)
    return inspect.Parameter(
        declaration.key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,  # what was not given is not passed on, because the declaration has the default
        annotation=Annotated[declaration.kind.cli | None, said],
    )
