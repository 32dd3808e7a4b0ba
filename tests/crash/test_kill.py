"""A training process is killed with SIGKILL at random moments and resumed until it ends: the final weights are, byte for byte,
those of a run that nobody disturbed. Four kills in `make test`, three more in `make deep`, a hundred in `make soak`.
"""

import os
import random
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import trainee
from forked import PROCESSES
from saved_models import save_with_tables
from tiers import sampled
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

pytestmark = pytest.mark.process

STEPS = 24
# The last twelve: of units with a trained family of their own (speculative), of states in memory with few checkpoints, of
# subspaces that change, of adapters, of row tables, of a mixture whose experts come one at a time, of embeddings by rows,
# frozen and trained, of tables in blocks by rows, frozen and trained, and of a head by ranges of its rows, trained and frozen.
POLICIES = ["immediate", "deferred", "speculative", "rows", "seldom", "lsp", "adapters", "tables", "experts", "embedding"]
POLICIES += ["trained embedding", "tables in blocks", "tables by rows", "head by ranges", "head that comes"]
# Where a run of subspaces is killed. The first step fits 3 blocks of 7 matrices, later ones are checks of a block each.
FIT = "headrace.update.wires.subspace:Subspace.fit"
MOMENTS = {
    "before a check": "headrace.update.wires.lsp:_Check._judge:1:before",
    "within a check": "headrace.update.wires.lsp:_Check._judge:4:after",
    "after a check": "headrace.update.wires.lsp:_Check.finish:16:after",
    "before a fit": f"{FIT}:22:before",
    "after a fit": f"{FIT}:22:after",
    "before a merge": "headrace.engine.subject:settle:1:before",
    "within a merge": "headrace.flow.step.settle:_settle_unit:1:after",
    "after a merge": "headrace.engine.subject:settle:1:after",
    "before a commit": "headrace.store:StateStore.commit:4:before",
    "within a commit": "headrace.store.record:RecordFiles.write:4:after",
    "after a commit": "headrace.store:StateStore.commit:4:after",
}
# Where a run is killed that goes on under another plan after each step: between any two actions of its second change.
PLAN_MOMENTS = {
    "before the flush": "headrace.engine.trainer:Engine.rest:2:before",
    "after the flush": "headrace.engine.trainer:Engine._drop_buffers:2:before",
    "without buffers": "headrace.engine.trainer:Engine._drop_buffers:2:after",
    "before more space": "headrace.store:StateStore.grow_scratch:4:before",
    "after more space": "headrace.store:StateStore.grow_scratch:4:after",
    "under another plan": "headrace.engine.replanning:Replanning._take:2:after",
    "before its buffers": "headrace.engine.beginning:Run.parts:3:before",
    "after its buffers": "headrace.engine.beginning:Run.parts:3:after",
    "before its first commit": "headrace.store:StateStore.commit:4:before",
    "after its first commit": "headrace.store:StateStore.commit:4:after",
}

# Where a run is killed whose blocks come in parts.
PART_MOMENTS = {
    "as a part comes": "headrace.model.parts.part_slots:PartSlots.bring:150:before",
    "as a gradient leaves": "headrace.flow.weights.leaving:LeavingGradients.add:50:after",
    "before gradients are drained": "headrace.flow.weights.leaving:LeavingGradients.finish:14:after",
    "after a commit": "headrace.store:StateStore.commit:3:after",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    for name, config in (("dense", LlamaConfig(**sizes)), ("mixture", MixtralConfig(**sizes, num_key_value_heads=4))):
        torch.manual_seed(3)
        config.tie_word_embeddings = False
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path / name)
    save_with_tables(path / "tables", torch.bfloat16)
    return path / "dense"


def start(
    model: Path, folder: Path, policy: str, optimizer: str = "adamw", *, steps: int = STEPS, moment: str = ""
) -> BaseProcess:
    folder.mkdir(exist_ok=True)
    (folder / "ready").unlink(missing_ok=True)
    if policy == "experts":  # whose steps have ten times the operations
        model, steps = model.parent / "mixture", min(steps, 6)
    if policy.startswith("tables "):
        model, steps = model.parent / "tables", min(steps, 3 if policy == "tables by rows" else 8)
    arguments = (str(model), str(folder / "run"), str(folder / "out"), steps, policy, optimizer, moment)
    process = PROCESSES.Process(target=trainee.main, args=arguments)
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    process.join(250)
    assert process.exitcode == 0


def weights_of(folder: Path) -> bytes:
    return next((folder / "out").glob("*model.safetensors")).read_bytes()


def killed_at(model: Path, folder: Path, policy: str, steps: int, moment: str) -> bytes:
    """Return the weights of a run that was killed at a `moment`, and went on."""
    process = start(model, folder, policy, steps=steps, moment=moment)
    process.join(250)
    assert process.exitcode == -signal.SIGKILL, "the moment never came"
    finish(start(model, folder, policy, steps=steps))
    return weights_of(folder)


def kill_and_resume(model: Path, folder: Path, policy: str, kills: int, seed: int, optimizer: str = "adamw") -> bytes:
    """Return the weights of a run that was killed `kills` times on its way."""
    dice = random.Random(seed)
    for _ in range(kills):
        process = start(model, folder, policy, optimizer)
        while not (folder / "ready").exists():
            assert process.exitcode is None, "it died before it was killed"
            time.sleep(0.002)
        # From before the first step to some steps on: moments inside steps, between them, and in the midst of commits.
        time.sleep(dice.random() * 0.15)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        if (folder / "out").exists():  # it got to the end before it was killed: begin anew
            shutil.rmtree(folder)
    finish(start(model, folder, policy, optimizer))
    return weights_of(folder)


@pytest.mark.timeout(1200)
# Deferred: the next test.
@pytest.mark.parametrize("policy", sampled([policy for policy in POLICIES if policy != "deferred"], ["rows"]))
def test_killed_runs_end_like_unbroken_ones(policy: str, model: Path, tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    finish(start(model, unbroken, policy))
    expected = weights_of(unbroken)
    assert kill_and_resume(model, tmp_path / "killed", policy, kills=2, seed=len(policy)) == expected


@pytest.mark.timeout(280)
@pytest.mark.deep  # tests/equivalence/test_item_rules.py resumes such rules, and the test above kills rows
@pytest.mark.parametrize("rule", ["row_scaled", "matrix_scaled"])
def test_killed_runs_of_whole_rows_or_matrices_end_like_unbroken_ones(rule: str, model: Path, tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    finish(start(model, unbroken, "deferred", rule))
    expected = weights_of(unbroken)
    assert kill_and_resume(model, tmp_path / "killed", "deferred", kills=1, seed=5, optimizer=rule) == expected


@pytest.mark.timeout(280)
@pytest.mark.deep
def test_killed_runs_round_their_moments_like_unbroken_ones(model: Path, tmp_path: Path) -> None:
    """Moments of 8 bits are rounded at random: a resumed run must draw what the unbroken one drew."""
    unbroken = tmp_path / "unbroken"
    finish(start(model, unbroken, "deferred", "adamw:moments=int8"))
    expected = weights_of(unbroken)
    assert kill_and_resume(model, tmp_path / "killed", "deferred", kills=2, seed=8, optimizer="adamw:moments=int8") == expected


@pytest.fixture(scope="module")
def unbroken_subspaces(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("subspaces") / "unbroken"
    finish(start(model, folder, "lsp", steps=5))
    return weights_of(folder)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("moment", sampled(MOMENTS, ["within a merge"]))
def test_killed_at_a_check_a_fit_a_merge_or_a_commit_subspaces_end_like_unbroken_ones(
    moment: str, model: Path, unbroken_subspaces: bytes, tmp_path: Path
) -> None:
    assert killed_at(model, tmp_path / "killed", "lsp", 5, MOMENTS[moment]) == unbroken_subspaces


@pytest.fixture(scope="module")
def one_plan(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights of a run under one plan from its first step to its last."""
    folder = tmp_path_factory.mktemp("plans") / "one"
    finish(start(model, folder, "one plan", steps=4))
    return weights_of(folder)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("moment", sampled(PLAN_MOMENTS, ["after more space"]))
def test_killed_as_it_changes_its_plan_a_run_ends_as_under_one_plan(
    moment: str, model: Path, one_plan: bytes, tmp_path: Path
) -> None:
    assert killed_at(model, tmp_path / "killed", "plans", 4, PLAN_MOMENTS[moment]) == one_plan


@pytest.mark.timeout(280)
@pytest.mark.parametrize("moment", sampled(PART_MOMENTS, ["as a gradient leaves"]))
def test_killed_with_its_blocks_in_parts_a_run_ends_as_with_whole_blocks(
    moment: str, model: Path, one_plan: bytes, tmp_path: Path
) -> None:
    assert killed_at(model, tmp_path / "killed", "parts", 4, PART_MOMENTS[moment]) == one_plan


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_kills(policy: str, model: Path, tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    finish(start(model, unbroken, policy))
    expected = weights_of(unbroken)
    for round_number in range(10):
        folder = tmp_path / f"killed{round_number}"
        assert kill_and_resume(model, folder, policy, kills=5, seed=1000 + round_number) == expected
