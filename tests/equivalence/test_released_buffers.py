"""Nothing reads a buffer that was released: filled with NaN then, runs of each kind have the bits that they have otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import SPLIT, train
from poisoned import Poison
from test_parted_experts import parted, together

from headrace.engine.seams import Seams
from headrace.generate.passes.generator import Generator
from headrace.terms.options.budget import Budget
from headrace.terms.program import Pool

FEW = {"chunk_elements": 2048, "resident_states": (), "host_slots": 2, "prefetch": 1, "state_slots": 2}
ON_SSD = {"stash_tiers": lambda plan: ("ssd",) * plan.num_blocks, "stash_slots": 2}
WEIGHTS = (Pool.HOST_WEIGHTS, Pool.DEVICE_WEIGHTS, Pool.EXPERTS, Pool.DEVICE_EXPERTS)
RUNS: dict[str, dict[str, Any]] = {
    "trained": {"adjust": SPLIT | FEW | ON_SSD},
    "trained, a device": {"adjust": SPLIT | FEW | ON_SSD | {"device_slots": 2}, "device_memory": "1GiB"},
    "trained, updated on a device": {"adjust": SPLIT | FEW | {"device_update_every": 2}, "device_memory": "1GiB"},
    "adapters, a device": {"adapter": "lora:rank=4", "adjust": SPLIT | ON_SSD, "device_memory": "1GiB"},
    "experts, a device": {"adjust": SPLIT | {"experts": together(2)}, "device_memory": "1GiB", "seams": Seams(parted=True)},
    "adapters of experts": {
        "adapter": "lora:rank=4,target_modules=o_proj+experts",
        "adjust": SPLIT | {"experts": together(2)},
        "seams": parted("lora:rank=4,target_modules=o_proj+experts"),
        "device_memory": "1GiB",
    },
}


@pytest.mark.deep
@pytest.mark.parametrize("way", RUNS)
def test_a_run_reads_nothing_that_was_released(way: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("many-experts" if "experts" in way else "llama", "bfloat16")
    expected = train(path, tmp_path / "plain", **RUNS[way])
    with pytest.MonkeyPatch.context() as patch:
        poison = Poison(patch)
        found = train(path, tmp_path / "poisoned", **RUNS[way])
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    assert sum(poison.filled[pool] for pool in WEIGHTS), dict(poison.filled)


@pytest.mark.deep
def test_a_generation_reads_nothing_that_was_released(model_dir: Callable[..., Path]) -> None:
    path, budget = model_dir("llama", "bfloat16"), Budget(host="4GiB", device="1GiB")

    def answers() -> list[Any]:
        with Generator.open(path, budget) as generator:
            prompts = torch.randint(2, 300, (3, 12), generator=torch.Generator().manual_seed(0))
            return sorted(generator.generate(prompts.tolist(), max_new_tokens=6, do_sample=False))

    expected = answers()
    with pytest.MonkeyPatch.context() as patch:
        poison = Poison(patch)
        assert answers() == expected
    assert sum(poison.filled.values()), dict(poison.filled)
