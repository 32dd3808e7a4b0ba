"""One block of real size of each family has the losses and gradients of plain PyTorch on the same GPU; experts come singly.

What libraries choose by shape (kernels, tiles) is other than in tiny models.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_world import batch_of
from plan_changes import changed
from real_blocks import BLOCKS, COMMON, expected, far, joined, save_block
from safetensors.torch import load_file

import headrace
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan

pytestmark = pytest.mark.gpu
ROWS, LENGTH, RATE = 2, 64, 1000.0


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_has_the_loss_and_the_gradients_of_plain_pytorch(name: str, gpu: torch.device, tmp_path: Path) -> None:
    def adjust(plan: Plan) -> Plan:
        split = {"micro_batch_sequences": 1, "num_micro_batches": ROWS, "accumulate": True, "loss_chunk_tokens": LENGTH}
        return changed(plan, **split)

    path, parted = save_block(tmp_path, name), "A3B" in name
    batch = batch_of(ROWS, LENGTH, 0, vocabulary=int(COMMON["vocab_size"]))
    loss, last, gradients = expected(path, batch, str(gpu))
    options: dict[str, Any] = {"optimizer": "sgd:momentum=0", "learning_rate": RATE, "weight_decay": 0.0, "max_grad_norm": None}
    options |= {"host_memory": "16GiB", "device_memory": "12GiB", "compute_dtype": "float32", "output": tmp_path / "run"}
    options |= {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    seams = Seams(parted=True) if parted else None
    with Engine.open(path, headrace.Options(**options), seams=seams, adjust_plan=adjust) as engine:
        assert engine.plan is not None
        assert (engine.plan.experts is not None) == parted
        assert engine.evaluate(batch).loss == pytest.approx(loss, rel=1e-4), "forward alone"
        assert far(engine.next_logits({"input_ids": batch["input_ids"]}).cpu(), last) < 1e-4
        assert engine.step(batch).loss == pytest.approx(loss, rel=1e-4)
        engine.save_pretrained(tmp_path / "out")
    before, after = (
        {k: t.float() for shard in each.glob("*.safetensors") for k, t in load_file(shard).items()}
        for each in (path, tmp_path / "out")
    )
    found = joined({key: before[key] - weight for key, weight in after.items()}, gradients)
    assert found.keys() == gradients.keys()
    wrong = {key: far(found[key] / RATE, want) for key, want in gradients.items()}
    assert max(wrong.values()) < 2e-4, {key: value for key, value in wrong.items() if value >= 2e-4}
