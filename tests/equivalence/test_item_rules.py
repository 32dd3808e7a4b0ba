"""Rules that need whole rows or whole matrices train through every placement: the same bits, and plain PyTorch's numbers.

The doubles of `headrace.testing.item_rules`; Mixtral has stacks of matrices, its experts, each of which is an item.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, PlainTrainer, batch_of, everything, train
from plan_changes import changed
from safetensors.torch import load_file
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.terms.cuts import least_chunk_elements
from headrace.testing import RowWire, item_rules
from headrace.update.rules.table import RULES

GIVEN: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5}


def smallest(plan: Any) -> int:
    """Return the elements of the smallest chunks that every row or matrix fits in."""
    return max(least_chunk_elements(unit.cuts) for unit in plan.units)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(RULES)
    item_rules.register()
    yield
    RULES.clear()
    RULES.update(before)


PLACEMENTS: dict[str, dict[str, Any]] = {
    "states on SSD, the smallest chunks, plain": {
        "adjust": {"chunk_elements": smallest, "resident_states": (), "host_slots": 2, "prefetch": 1, "state_slots": 1},
        "interpreter": "plain",
    },
    "states in memory, each second chunk on the device": {
        "adjust": {"resident_states": everything, "device_update_every": 2, "chunk_elements": smallest},
        "device_memory": "1GiB",
    },
    "speculative, some late, states on SSD, all on the device": {
        "adjust": {"update_policy": "speculative", "late_units": (0, 2), "resident_states": (), "device_update_every": 1},
        "device_memory": "1GiB",
    },
}


class Plain(torch.optim.Optimizer):
    """The same rules as one would write them in PyTorch, parameter by parameter."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], by_matrix: bool, weight_decay: float) -> None:
        super().__init__([parameter for _, parameter in named], {})
        self.named, self.by_matrix, self.weight_decay = named, by_matrix, weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, p in self.named:
            g, decayed = p.grad, p.dim() >= 2 and "norm" not in name
            assert g is not None
            if p.dim() >= 2 and "embed" not in name:
                g = g / (g.norm(dim=(-2, -1), keepdim=True) if self.by_matrix else g.square().mean(-1, keepdim=True).sqrt())
            buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
            buffer.mul_(0.9).add_(g + (self.weight_decay * p if decayed else 0))
            p.sub_(1e-2 * buffer)


@pytest.mark.parametrize("rule", sampled(["row_scaled", "matrix_scaled", "muon"], []))
def test_placement_changes_nothing(rule: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("mixtral-aux", "bfloat16")
    base, weights = train(path, tmp_path / "base", **GIVEN, optimizer=rule, adjust=SPLIT)
    for number, (placement, options) in enumerate(PLACEMENTS.items()):
        options = options | {"adjust": SPLIT | options["adjust"]}
        losses, got = train(path, tmp_path / f"run{number}", **GIVEN, optimizer=rule, **options)
        assert losses == base, placement
        for key, want in weights.items():
            assert torch.equal(got[key], want), f"{placement}: {key} differs"


@pytest.mark.parametrize(("rule", "model"), sampled([("row_scaled", "llama-tied"), ("matrix_scaled", "mixtral-aux")]))
def test_it_is_plain_pytorch_and_a_resumed_run_goes_on(
    rule: str, model: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir(model)
    plain = PlainTrainer(path, 1e-2, 0.1, 0.5)
    plain.optimizer = Plain(list(plain.model.named_parameters()), rule == "matrix_scaled", 0.1)  # type: ignore[assignment]
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(4)]
    lengths: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB"}
    given = GIVEN | lengths | {"optimizer": rule, "compute_dtype": "float32", "output": tmp_path / "run"}
    with Engine.open(path, headrace.Options(**given)) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2)]
    with Engine.resume(tmp_path / "run") as engine:
        losses += [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2, 4)]
        engine.save_pretrained(tmp_path / "out")
    assert losses == pytest.approx(expected, rel=2e-6)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.wide
def test_a_trained_family_of_its_own_beside_frozen_blocks_is_cut_so_too(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, given = model_dir("llama", "bfloat16"), GIVEN | {"optimizer": "matrix_scaled", "seams": Seams(wire=RowWire())}
    base, weights = train(path, tmp_path / "base", **given, adjust=SPLIT)
    adjust = SPLIT | {"chunk_elements": smallest, "resident_states": (), "host_slots": 2, "prefetch": 1, "state_slots": 1}
    losses, got = train(path, tmp_path / "run", **given, adjust=adjust, interpreter="plain")
    assert losses == base
    assert all(torch.equal(got[key], want) for key, want in weights.items())


@pytest.mark.wide
def test_its_chunks_are_whole_matrices_and_the_longest_has_room_in_the_buffers(
    model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """In the plan, in the store, and when a batch asks for a larger plan over the store that is there."""
    path = model_dir("llama", "bfloat16")
    given = GIVEN | {"optimizer": "matrix_scaled", "host_memory": "4GiB", "output": tmp_path / "run"}
    lengths = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    with Engine.open(
        path, headrace.Options(**given, **lengths), adjust_plan=lambda plan: changed(plan, chunk_elements=smallest(plan))
    ) as engine:
        plan, units = engine.plan, engine.store.manifest.units
        assert plan is not None
        # The largest matrix is the head: 384 rows of 64.
        assert plan.updates.chunk_elements == 384 * 64
        for number, (unit, layout) in enumerate(zip(units, engine.chain.layouts, strict=True)):
            borders = [plan.chunk(number, chunk) for chunk in range(plan.num_chunks(number))]
            assert borders == list(unit.weights.chunks)
            for each in layout.parameters:
                if len(each.shape) == 2 and "embed" not in each.name:
                    assert any(start <= each.offset < each.offset + each.num_elements <= stop for start, stop in borders)
        engine.step(batch_of(ROWS, LENGTH, 0))
        engine.step(batch_of(ROWS, LENGTH + 16, 1))
        assert engine.plan is not plan
        assert engine.plan.updates.chunk_elements == plan.updates.chunk_elements
        engine.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")
