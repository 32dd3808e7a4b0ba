"""The options of commands, from their declarations: a command with `**given` takes them all.

Invariant: this module knows no option itself; names, types and help come from the classes of options in `terms/`.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, ParamSpec, TypeVar

import typer

from headrace.terms.options.declared import Declaration

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
