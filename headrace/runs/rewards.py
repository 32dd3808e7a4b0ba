"""Functions of the user's that reward completions: `FILE.py:NAME`."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.terms.errors import ConfigError, in_one_line

Reward = Callable[..., Sequence[float]]


def reward_of(text: str) -> Reward:
    """Return the function that `FILE.py:NAME` names; the file may import others of its folder.

    Raises:
        ConfigError: there is none.
    """
    path, colon, name = text.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise ConfigError(f"reward: {text!r}: expected FILE.py:NAME, a function of a Python file")
    if not Path(path).is_file():
        raise ConfigError(f"reward: {path}: there is no such file")
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
    found: Reward | None = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(f"reward: {path} has no function {name}")
    return found
