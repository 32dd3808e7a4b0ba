"""Are mutants noticed by the tests nearest to them? `make mutants`: in forks of a process that has imported all.

A line is written for each as it ends, so a run that was interrupted goes on. See python tests/mutants/run.py --help
"""

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import random
import signal
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(ROOT), str(FOLDER)]

from mutant import Mutant  # noqa: E402

LEAST_PERCENT = 92
# The tests nearest to each room, dearest last: where the first do not notice a mutant the next are asked.
NEAREST = {
    "headrace.plan.schedules.ledger": ("tests/plan/schedules", "tests/plan/test_program.py"),
    "headrace.flow.run": ("tests/flow",),
    "headrace.flow.weights": (
        "tests/flow tests/equivalence/test_moments.py",
        "tests/equivalence/test_block_parts.py tests/equivalence/test_parted_experts.py",
        "tests/equivalence/test_trained_experts.py tests/equivalence/test_ranged_head.py tests/generation/test_banks.py",
    ),
    "headrace.flow.step": (
        "tests/flow tests/equivalence/test_moments.py",
        "tests/equivalence/test_stages.py tests/equivalence/test_shards.py tests/equivalence/test_whole_loss.py",
        "tests/equivalence/test_engine.py tests/equivalence/test_hosted.py tests/equivalence/test_going_on.py "
        "tests/equivalence/test_pages_of_blocks.py tests/equivalence/test_visiting_head.py tests/equivalence/test_lsp.py",
        "tests/equivalence/test_adapters.py tests/equivalence/test_parted_experts.py tests/equivalence/test_seldom_written.py "
        "tests/equivalence/test_router_loss.py tests/equivalence/test_combinations.py tests/equivalence/test_one_by_one.py",
    ),
    "headrace.terms.shelf": ("tests/terms/test_shelf.py", "tests/generation/test_banks.py"),
    "headrace.store": (
        "tests/store",
        "tests/equivalence/test_shards_commit.py tests/equivalence/test_damage_on_the_way.py "
        "tests/equivalence/test_resharing.py",
    ),
    "headrace.update": ("tests/update", "tests/equivalence/test_lsp.py tests/equivalence/test_adapters.py"),
    "headrace.peers.meet": ("tests/net", "tests/equivalence/test_shards.py tests/equivalence/test_stages.py"),
    "headrace.peers.stages": ("tests/equivalence/test_stages.py", "tests/equivalence/test_stages_faults.py"),
    "headrace.peers.local_steps": ("tests/local_steps",),
    "headrace.peers.node": ("tests/equivalence/test_node_equals_local.py", "tests/equivalence/test_node_workers.py"),
    "headrace.model.parts.runner": (
        "tests/model tests/equivalence/test_sample_lengths.py",
        "tests/equivalence/test_packed.py tests/equivalence/test_whole_loss.py",
    ),
    "headrace.data.chat.turns": ("tests/data",),
}
USUAL = "not deep and not process and not soak and not net and not gpu and not wide"
# For each group of tests, whose own limit of a test ends what hangs: a mutant that hangs is one that is noticed.
MOST_SECONDS = 3600.0
_STALE = 99


def groups_of(mutant: Mutant) -> Sequence[str]:
    """Return the groups of tests that are asked about a mutant."""
    room = max((room for room in NEAREST if mutant.module.startswith(room)), key=len)
    return NEAREST[room]


def import_all() -> None:
    """Import what tests need, so that forks do not. Nothing is computed here: threads of libraries would not be in a fork."""
    import headrace

    for name in ("torch", "transformers", "datasets", "numba", "pytest", "hypothesis", "peft", "safetensors.torch"):
        importlib.import_module(name)
    for found in pkgutil.walk_packages(headrace.__path__, "headrace."):
        if not any(word in found.name for word in ("triton", "__main__", "lm_eval")):
            importlib.import_module(found.name)


def outcome(mutant: Mutant | None, tests: str) -> str:
    """Return what the tests say of a mutant, or of the code as it is: noticed, lives, hangs, or stale."""
    child = os.fork()
    if not child:
        os.setsid()
        os._exit(tested(mutant, tests))
    ends = time.monotonic() + MOST_SECONDS
    while time.monotonic() < ends:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            return "stale" if code == _STALE else "noticed" if code else "lives"
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def tested(mutant: Mutant | None, tests: str) -> int:
    """In the fork: run the tests, and return pytest's exit code."""
    import pytest

    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    try:
        if mutant is not None:
            mutant.apply()
    except (LookupError, AttributeError, AssertionError):
        return _STALE
    return int(pytest.main([*tests.split(), "-x", "-q", "-p", "no:xdist", "-m", USUAL]))


@cache
def check_unchanged(tests: str) -> None:
    """Tests that fail without a mutant, or take too long, would notice each."""
    said = outcome(None, tests)
    if said != "lives":
        sys.exit(f"{tests}: these fail or hang on the code as it is; mend them first")


def judge(mutant: Mutant) -> str:
    """Return the outcome of the first group of tests that notices a mutant, or of the last."""
    said = "lives"
    for tests in groups_of(mutant):
        said = outcome(mutant, tests)
        if said in ("noticed", "hangs"):
            check_unchanged(tests)
        if said != "lives":
            break
    return said


def main() -> int:
    """Judge all that `OUTPUT` does not know yet; return whether too many live."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "bench-results" / "mutants.jsonl")
    parser.add_argument("--only", default="", help="those whose function begins so, such as headrace.store")
    parser.add_argument("--minutes", type=float, default=120.0)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    mutants = [Mutant(**row) for row in json.loads((FOLDER / "mutants.json").read_text(encoding="utf-8"))]
    equivalent = {Mutant(**row["mutant"]) for row in json.loads((FOLDER / "equivalent.json").read_text(encoding="utf-8"))}
    asked = [mutant for mutant in mutants if mutant not in equivalent and mutant.function.startswith(arguments.only)]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if arguments.output.exists():
        rows = map(json.loads, arguments.output.read_text(encoding="utf-8").splitlines())
        known = {row["mutant"]: row["outcome"] for row in rows}
    random.Random(0).shuffle(asked)  # so that what was judged before an interruption is a fair sample
    import_all()
    ends = time.monotonic() + 60 * arguments.minutes
    with arguments.output.open("a", encoding="utf-8") as file:
        for mutant in asked:
            if mutant.words in known or time.monotonic() > ends:
                continue
            began = time.monotonic()
            known[mutant.words] = said = judge(mutant)
            row = {"mutant": mutant.words, "outcome": said, "seconds": round(time.monotonic() - began, 1)}
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{said:8} {mutant.words}", flush=True)
    return report([(mutant.words, known.get(mutant.words, "not judged")) for mutant in asked])


def report(found: Sequence[tuple[str, str]]) -> int:
    """Print what lives, and return 1 where too much does, or the list is stale."""
    judged = [said for _, said in found if said in ("noticed", "hangs", "lives")]
    noticed = sum(said != "lives" for said in judged)
    for words, said in found:
        if said in ("lives", "stale"):
            print(f"{said}: {words}")
    percent = 100 * noticed / max(1, len(judged))
    open_ones = len(found) - len(judged)
    print(f"{noticed} of {len(judged)} mutants are noticed, {percent:.1f} % ({LEAST_PERCENT} asked); {open_ones} not judged")
    return int(percent < LEAST_PERCENT or any(said == "stale" for _, said in found))


if __name__ == "__main__":
    sys.exit(main())
