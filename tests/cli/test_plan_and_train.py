"""What `headrace plan` says of a run is what `headrace train` says of it, each in a process of its own.

Run: pytest tests/cli/test_plan_and_train.py
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bad_worlds import World

MIB = 1 << 20


def test_the_interpreter_takes_in_both_what_it_takes_in_a_run(world: World, tmp_path: Path) -> None:
    """A plan is made without kernels and data libraries, which a run loads: what they take must be in it all the same."""
    words = world.train_words()
    step = ("--tokens-per-step", words[words.index("--tokens-per-step") + 1])
    step += ("--sequence-length", words[words.index("--sequence-length") + 1])
    told = json.loads(headrace("plan", str(world.model), *step, "--json"))
    headrace(*words)
    planned = row(told["plan"])
    taken = row(json.loads((world.run / "plan.json").read_text()))
    assert abs(planned - taken) <= 24 * MIB, f"planned {planned / MIB:.0f} MiB, a run takes {taken / MIB:.0f} MiB"


def test_a_run_says_what_it_plans_then_what_it_imports_then_its_steps(world: World) -> None:
    lines = headrace(*world.train_words()).splitlines()
    places = [
        next(number for number, line in enumerate(lines) if line.startswith(words))
        for words in ("allowed", "info: importing", "step 1/2")
    ]
    assert places == sorted(places)
    assert lines[places[1]].endswith(" of weights")


def row(plan: dict[str, Any]) -> int:
    return int(plan["peak_bytes"]["host"]["runtime"])


def headrace(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "headrace", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
