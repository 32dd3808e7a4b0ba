"""What a run directory holds, as found on disk: a run that was killed while the model came in is begun, not committed.

Run: pytest tests/training/test_run_state.py
"""

from pathlib import Path

from headrace.spec.events import Event
from headrace.spec.layout import PLANE_SETS, lay_out
from headrace.store import StateStore
from headrace.training.base import StateKind
from headrace.training.engines import state_of


def ignore(event: Event) -> None:
    """Sink of a test that does not look at events."""


def test_only_a_commit_makes_a_run_committed(tmp_path: Path) -> None:
    run, ssd = tmp_path / "run", tmp_path / "ssd"
    ssd.mkdir()
    assert state_of(run) is StateKind.NONE
    layouts = (lay_out("prologue", [("embed.weight", (40, 32), (1.0, 0.1))]),)
    store = StateStore.create(
        run,
        [ssd],
        layouts,
        PLANE_SETS["bfloat16"],
        chunk_elements=2048,
        scratch_bytes=0,
        identity={},
        sink=ignore,
        allow_tmpfs=True,
    )
    assert state_of(run) is StateKind.BEGUN
    store.commit({"step": 0})
    assert state_of(run) is StateKind.COMMITTED
    store.close()
    assert state_of(run) is StateKind.COMMITTED
