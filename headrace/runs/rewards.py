"""Functions of the user's that reward completions: `FILE.py:NAME`, called as TRL calls them.

Invariant: what a function says counts as it was said. None is left out, and anything but a finite number ends the run.
"""

import asyncio
import importlib.util
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, DataError, in_one_line

Reward = Callable[..., Any]

# What a function gets beside the columns of the data.
OFFERED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
# Columns that would be mistaken for what the model wrote.
_NOT_PASSED = ("prompt", "completion", "completion_ids")


def reward_of(text: str, loaded: dict[str, ModuleType] | None = None) -> Reward:
    """Return the function that `FILE.py:NAME` names; the file may import others of its folder. Files that are `loaded` are not
    run again.

    Raises:
        ConfigError: there is none.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ConfigError(f"reward: {text!r}: expected FILE.py:NAME, a function of a Python file")
    if not Path(path).is_file():
        raise ConfigError(f"reward: {path}: there is no such file")
    loaded = {} if loaded is None else loaded
    if path not in loaded:
        loaded[path] = _module(path)
    found: Reward | None = getattr(loaded[path], name, None)
    if not callable(found):
        raise ConfigError(f"reward: {path} has no function {name}")
    return found


def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    assert spec is not None, "a Python file"
    assert spec.loader is not None, "which can be run"
    module, beside = importlib.util.module_from_spec(spec), str(Path(path).parent.absolute())
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file raises
        raise ConfigError(f"reward: {path}: {type(error).__name__}: {in_one_line(error)}") from error
    finally:
        sys.path.remove(beside)
    return module


@dataclass(frozen=True)
class Judged:
    """The sum of what all functions said of each completion, NaN where all said None. They also logged: means of `metrics`,
    and `extra` columns with a value for each completion.
    """

    rewards: list[float]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)


class Rewards(Closing):
    """The functions that `texts` name, for data with `columns`. It owns the loop in which asynchronous ones run.

    `reserved` are figures that no function may log under their names.
    """

    def __init__(self, texts: Sequence[str], columns: Iterable[str], reserved: Iterable[str] = ()) -> None:
        """Load the functions.

        Raises:
            ConfigError: one is not there, or takes an argument that nothing gives.
        """
        self._columns = tuple(name for name in columns if name not in (*_NOT_PASSED, *OFFERED))
        loaded: dict[str, ModuleType] = {}  # functions of one file share its state
        self._functions = {text: reward_of(text, loaded) for text in texts}
        self._takes = {text: self._taken(text, function) for text, function in self._functions.items()}
        self._reserved = frozenset(reserved)
        self._runner: asyncio.Runner | None = None

    def close(self) -> None:
        """End the loop of asynchronous functions."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def judged(self, given: Mapping[str, Any], columns: Mapping[str, list[Any]]) -> Judged:
        """Return what the functions say of completions. `given` has the first four of `OFFERED`; asynchronous functions run at
        the same time, after the others.

        Raises:
            DataError: one raised, or said anything but a finite number or None for each completion.
        """
        count = len(given["completions"])
        extra, metrics = defaultdict[str, list[Any]](list), defaultdict[str, list[float]](list)
        logs = {
            "log_extra": lambda column, values: extra[str(column)].extend(values),
            "log_metric": lambda name, value: metrics[str(name)].append(float(value)),
        }
        offered = {**{name: columns[name] for name in self._columns}, **given, **logs}
        said = {text: self._said(text, offered) for text in self._functions}
        if waiting := {text: each for text, each in said.items() if inspect.isawaitable(each)}:
            said |= self._awaited(waiting)
        numbers = [_numbers(text, each, count) for text, each in said.items()]
        sums = [
            math.nan if all(each is None for each in row) else sum(each for each in row if each is not None)
            for row in zip(*numbers, strict=True)
        ]
        self._refuse_logs(extra, metrics, count)
        return Judged(sums, {name: sum(each) / len(each) for name, each in metrics.items()}, dict(extra))

    def _taken(self, text: str, function: Reward) -> frozenset[str] | None:
        """Return the names of the arguments that a function takes; None: all."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # it has none that Python knows
            return None
        takes = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
        missing = [each for each in needed if each not in takes or each not in (*OFFERED, *self._columns)]
        if missing:
            has = ", ".join(self._columns) or "none"
            raise ConfigError(
                f"reward: {text} takes {', '.join(missing)}, which nothing gives; it gets {', '.join(OFFERED)} and the columns "
                f"beside prompt ({has}) by their names"
            )
        return None if any(each.kind is each.VAR_KEYWORD for each in parameters) else frozenset(takes)

    def _said(self, text: str, offered: Mapping[str, Any]) -> Any:
        takes = self._takes[text]
        try:
            return self._functions[text](**{name: each for name, each in offered.items() if takes is None or name in takes})
        except Exception as error:  # whatever the user's function raises
            raise _raised(text, error) from error

    def _awaited(self, waiting: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
        async def named(text: str, each: Awaitable[Any]) -> Any:
            try:
                return await each
            except Exception as error:  # as above
                raise _raised(text, error) from error

        async def together() -> list[Any]:
            return await asyncio.gather(*(named(*each) for each in waiting.items()))

        self._runner = self._runner or asyncio.Runner()
        return dict(zip(waiting, self._runner.run(together()), strict=True))

    def _refuse_logs(self, extra: Mapping[str, list[Any]], metrics: Mapping[str, list[float]], count: int) -> None:
        if taken := next((name for name in (*extra, *metrics) if name in self._reserved), None):
            raise DataError(f"reward: {taken!r} is a figure of the run itself; log it under another name")
        for column, values in extra.items():
            if len(values) != count:
                raise DataError(
                    f"reward: log_extra: {column!r} has {len(values)} values, the step {count} completions; give one for each"
                )


def _numbers(text: str, said: Any, count: int) -> list[float | None]:
    try:
        found = [None if each is None else float(each) for each in said]
    except Exception as error:  # a value of any kind
        raise _raised(text, error) from error
    wrong = next((each for each in found if each is not None and not math.isfinite(each)), None)
    if len(found) != count or wrong is not None:
        what = f"{len(found)} numbers" if wrong is None else wrong
        raise DataError(f"reward: {text}: expected None or a finite number for each of {count} completions, found {what}")
    return found


def _raised(text: str, error: Exception) -> DataError:
    return DataError(f"reward: {text}: {type(error).__name__}: {in_one_line(error)}")
