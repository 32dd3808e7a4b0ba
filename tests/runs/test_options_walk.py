"""How far the options of a run walk: where a function asks the whole of them what a job knows, it is counted.

`pytest -s -m wide tests/runs/test_options_walk.py` prints the walk.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import pytest
from saved_models import save

import headrace
from headrace.runs import train
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import RunOptions

ROOT = str(Path(headrace.__file__).parent)
MOST = 70
# A function that has been entered so often without options gets none.
_ENOUGH = 200


def walk_of(run: Callable[[], object]) -> list[str]:
    """Return the functions of the package that were entered with whole options as an argument, `self` included, in order."""
    entered, parameters, without = list[str](), dict[CodeType, tuple[str, ...]](), dict[CodeType, int]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or parameters.get(code) == ():
            return
        if code not in parameters:
            own = code.co_filename.startswith(ROOT) and not code.co_name.startswith("<")
            parameters[code] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if own else ()
        if any(isinstance(frame.f_locals.get(name), Options) for name in parameters[code]):
            entered.append(f"{code.co_filename.removeprefix(ROOT)}: {code.co_qualname}")
        elif without.setdefault(code, 0) < _ENOUGH:
            without[code] += 1
        else:
            parameters[code] = ()

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.wide
def test_options_are_asked_as_a_whole_at_the_door_and_seldom_behind_it(tmp_path: Path) -> None:
    model, _ = save(tmp_path)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": [5 + (row + at) % 60 for at in range(20)]}) + "\n" for row in range(16)))
    lengths = {"sequence_length": 16, "tokens_per_step": 32, "max_steps": 2}
    where = {"model": model, "data": str(data), "output": tmp_path / "run", "cache": tmp_path / "cache"}
    options = RunOptions.of({**where, **lengths, "host_memory": "2GiB", "measure": False})
    walk = walk_of(lambda: train(options))
    print(f"{len(walk)} entries of {len(set(walk))} functions", *walk, sep="\n")
    assert walk[0].endswith(": train")
    assert len(walk) <= MOST
