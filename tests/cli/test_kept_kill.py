"""A run is killed while it writes a checkpoint: nothing half is left, and the resumed run writes it again, with the same bits.

Run: pytest tests/cli/test_kept_kill.py
"""

import signal
from pathlib import Path

import pytest
from bad_worlds import World
from forked import PROCESSES, kill_at
from tiers import sampled

from headrace.cli import main
from headrace.store.run_directory import RunDirectory

pytestmark = pytest.mark.process

MOMENTS = {
    "before a tensor": "headrace.model.stored.shard_writer:ShardWriter.write:15:before",
    "before it is renamed": "headrace.files.durable:_sync_tree:2:after",
    "after it is renamed": "headrace.files.durable:os.replace:2:after",
    "before the next commit": "headrace.store:StateStore.commit:4:before",
    "after the next commit": "headrace.store:StateStore.commit:4:after",
    "in the last": "headrace.model.stored.shard_writer:ShardWriter.finish:3:before",
}


def run(words: list[str], moment: str = "") -> None:
    if moment:
        kill_at(moment)
    main(words)


def started(words: list[str], moment: str = "") -> int | None:
    process = PROCESSES.Process(target=run, args=(words, moment))
    process.start()
    process.join(250)
    return process.exitcode


def weights(run: Path) -> dict[str, bytes]:
    models = [run / name for name in ("checkpoint-2", "checkpoint-4", "checkpoint-5", "final")]
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for model in models for path in model.glob("*.safetensors")}


PAIRS = ("--loss", "dpo", "--adapter", "lora:rank=2", "--learning-rate", "1e-2")
CASES = [*((moment, ()) for moment in MOMENTS), ("before the next commit", PAIRS)]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("moment", "more"), sampled(CASES, [CASES[1], CASES[-1]]))
def test_killed_while_it_is_written_it_is_written_again(moment: str, more: tuple[str, ...], world: World) -> None:
    undisturbed, killed = world.folder / "undisturbed", world.folder / "killed"
    if more:
        world.write_rows(*[{"prompt": f"{i} flows", "chosen": f" to {i}", "rejected": f" {i} dry"} for i in range(24)])
    assert started(world.train_words("--save-steps", 2, *more, max_steps=5, output=undisturbed)) == 0
    words = world.train_words("--save-steps", 2, *more, max_steps=5, output=killed, plan=undisturbed)
    assert started(words, MOMENTS[moment]) == -signal.SIGKILL, "the moment never came"
    for step, path in RunDirectory(killed).checkpoints().items():
        assert (path / "headrace.json").exists(), f"checkpoint-{step} is there, and not whole"
    assert started(["resume", str(killed)]) == 0
    assert weights(killed) == weights(undisturbed)
    assert not list(killed.glob(".checkpoint*"))
