"""The command that is asked for, built alone: of the others, help shows no more than name and purpose.

Typer makes all options of all commands before it looks at the words, which would take a fifth of `headrace --help`.
"""

import copy
import inspect
import os
from collections.abc import Sequence

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

# Where a shell asks for completions, it has the words in the environment.
COMPLETING = "_HEADRACE_COMPLETE"


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
