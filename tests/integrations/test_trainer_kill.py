"""A script is killed and started again with `resume_from_checkpoint=True`: the same bits, logs, checkpoints.

Run: pytest tests/integrations/test_trainer_kill.py
"""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from forked import PROCESSES, kill_at
from talking_model import save_talking_model
from tiers import sampled
from trainers import TEXTS, USUAL, weights

pytestmark = pytest.mark.process

MOMENTS = {
    "in the import": "headrace.store:StateStore.commit:1:before",
    "before a commit": "headrace.store:StateStore.commit:4:before",
    "in an evaluation": "headrace.engine.trainer:Engine.evaluate:2:before",
    "after an evaluation": "headrace.engine.trainer:Engine.evaluate:2:after",
    "in a checkpoint": "headrace.model.stored.shard_writer:ShardWriter.finish:2:before",
    "after the last step": "transformers:Trainer._finalize_training:1:before",
}


def script(folder: Path, name: str, resume: bool, moment: str = "") -> None:
    """What a user's script does."""
    from datasets import Dataset
    from transformers import TrainingArguments

    from headrace.integrations.transformers import HeadraceTrainer

    if moment:
        kill_at(moment)
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2}
    given |= {"logging_steps": 2, "save_total_limit": 2, "include_num_input_tokens_seen": "all"}
    args = TrainingArguments(output_dir=str(folder / name), **{**USUAL, **given})
    data = Dataset.from_list([{"text": text} for text in TEXTS])
    plan = {} if name == "whole" else {"plan": folder / "whole"}
    trainer = HeadraceTrainer(folder / "model", args, None, data, data, cache=folder / "cache", host_memory="2GiB", **plan)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.end()


def started(*given: Any) -> int | None:
    process = PROCESSES.Process(target=script, args=given)
    process.start()
    process.join(250)
    return process.exitcode


def logs(run: Path) -> list[dict[str, float]]:
    """Return the logs without what the clock says, and without the summary of a call of `train`."""
    state = json.loads((run / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 6
    timed = ("_runtime", "_per_second")
    entries = [entry for entry in state["log_history"] if "train_runtime" not in entry or "loss" in entry]
    return [{name: value for name, value in entry.items() if not name.endswith(timed)} for entry in entries]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("moment", sampled(MOMENTS, ["in an evaluation", "in a checkpoint"]))
def test_a_script_that_is_killed_goes_on(moment: str, tmp_path: Path) -> None:
    save_talking_model(tmp_path / "model")
    assert started(tmp_path, "whole", False) == 0
    assert started(tmp_path, "killed", False, MOMENTS[moment]) == -signal.SIGKILL, "the moment never came"
    assert started(tmp_path, "killed", True) == 0
    ours, theirs = tmp_path / "killed", tmp_path / "whole"
    assert logs(ours) == logs(theirs)
    for part in (".", "checkpoint-4", "checkpoint-6"):
        assert {name: each.numpy().tobytes() for name, each in weights(ours / part).items()} == {
            name: each.numpy().tobytes() for name, each in weights(theirs / part).items()
        }
    assert {path.name for path in ours.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6"}
    assert not list(ours.glob(".*saving"))
