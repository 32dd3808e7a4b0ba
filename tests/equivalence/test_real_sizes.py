"""One block of real size of each family has the losses and gradients of plain PyTorch, whole and with experts as parts.

What libraries choose by shape (kernels, tiles, threads) is other than in tiny models; so are sums of thousands of numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import batch_of
from plan_changes import changed
from real_blocks import BLOCKS, COMMON, expected, far, joined, save_block
from safetensors.torch import load_file

import headrace
from headrace.engine.seams import Seams, seams_of
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan

ROWS, LENGTH, RATE = 2, 64, 1000.0
EXPERTS = {"adapter": "lora:rank=4,target_modules=experts"}


@pytest.fixture(scope="module", params=BLOCKS)
def block(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of one block with random weights of bfloat16."""
    path = save_block(tmp_path_factory.mktemp("real"), request.param)
    yield path
    for each in path.iterdir():
        each.unlink()


def stepped(path: Path, run: Path, batch: dict[str, torch.Tensor], seams: Seams | None, **options: Any) -> tuple[Any, ...]:
    """Return a run's loss before a step of plain SGD, last logits, the step's loss, and the weights after it."""

    def adjust(plan: Plan) -> Plan:
        split = {"micro_batch_sequences": 1, "num_micro_batches": ROWS, "accumulate": True, "loss_chunk_tokens": LENGTH}
        return changed(plan, **split)

    given: dict[str, Any] = {"host_memory": "16GiB", "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    given |= {"optimizer": "sgd:momentum=0", "learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": None}
    with Engine.open(path, headrace.Options(output=run, **given | options), seams=seams, adjust_plan=adjust) as engine:
        assert engine.plan is not None
        assert (engine.plan.experts is not None) == (seams is not None)
        before = engine.evaluate(batch).loss
        logits = engine.next_logits({"input_ids": batch["input_ids"]})
        loss = engine.step(batch).loss
        engine.save_pretrained(run / "out")
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted((run / "out").glob("*.safetensors")):
        weights |= load_file(shard)
    return before, logits, loss, weights


@pytest.mark.deep
def test_a_block_has_the_loss_and_the_gradients_of_plain_pytorch(block: Path, tmp_path: Path) -> None:
    """Experts come one at a time: whole they have the same bits, which the adapters' test shows at this size."""
    parted = "A3B" in block.name
    batch = batch_of(ROWS, LENGTH, 0, vocabulary=COMMON["vocab_size"])
    loss, last, gradients = expected(block, batch)
    more = {"device_memory": "12GiB"} if parted else {}
    found = stepped(block, tmp_path / "run", batch, Seams(parted=True) if parted else None, compute_dtype="float32", **more)
    assert found[0] == pytest.approx(loss, rel=1e-5), "forward alone"
    assert far(found[1], last) < 1e-5
    assert found[2] == pytest.approx(loss, rel=1e-5)
    before = {name: tensor.float() for shard in block.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    stepped_by = joined({name: before[name] - weight for name, weight in found[3].items()}, gradients)
    assert stepped_by.keys() == gradients.keys()
    wrong = {name: far(stepped_by[name] / RATE, want) for name, want in gradients.items()}
    assert max(wrong.values()) < 2e-5, {name: value for name, value in wrong.items() if value >= 2e-5}


@pytest.mark.deep
def test_adapters_of_single_experts_are_those_of_whole_blocks(block: Path, tmp_path: Path) -> None:
    """In bfloat16, as runs are: the same losses and the same bits."""
    if "A3B" not in block.name:
        pytest.skip("it has no experts")
    batch = batch_of(ROWS, LENGTH, 0, vocabulary=COMMON["vocab_size"])
    seams = replace(seams_of(headrace.Options(**EXPERTS)), parted=True)
    given: dict[str, Any] = {**EXPERTS, "device_memory": "12GiB", "optimizer": "adamw", "learning_rate": 1e-3}
    runs = [stepped(block, tmp_path / str(number), batch, each, **given) for number, each in enumerate((None, seams))]
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert runs[0][2] == runs[1][2]
    assert runs[0][3].keys() == runs[1][3].keys()
    assert all(torch.equal(runs[0][3][name], runs[1][3][name]) for name in runs[0][3])
