"""Units of other forms than "all of it is trained, in place": frozen ones, coded ones, and ones with a trained family of their
own, through planner, interpreters, commits, resume and export. The doubles are those that `headrace.testing` ships.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import FAR_PLACEMENTS, LENGTH, ROWS, SPLIT, batch_of, train
from safetensors.torch import load_file
from tiers import sampled
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.families import STATES, TRAINED, WEIGHTS, Durability
from headrace.terms.forms import DEVICE
from headrace.testing import GroupedCodec, RowWire
from headrace.update.wires.factors import Factors

LR, DECAY = 1e-2, 0.1
STEPS = 3


class RowOffset(nn.Module):
    """A matrix plus a number for each row: what `RowWire` trains, as a parametrisation of plain PyTorch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(rows))

    def forward(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix + self.offset[:, None]


def matrices(model: Any) -> Iterator[nn.Linear]:
    return (module for block in model.model.layers for module in block.modules() if isinstance(module, nn.Linear))


def plain_rows(
    path: Path, *, ends: bool, weights: dict[str, torch.Tensor] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and merged weights of plain PyTorch in float32, a trained number for each row of blocks' matrices."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    model.load_state_dict(weights or {}, strict=False)
    model.requires_grad_(ends)
    model.model.layers.requires_grad_(False)
    decayed, rest = ([p for p in model.parameters() if p.requires_grad and p.dim() > 1], [])
    rest += [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    for module in matrices(model):
        parametrize.register_parametrization(module, "weight", RowOffset(module.out_features))
        module.parametrizations.weight[0].requires_grad_(True)  # type: ignore[index, union-attr]
        decayed.append(module.parametrizations.weight[0].offset)  # type: ignore[index, union-attr, arg-type]
    for block in model.model.layers:
        for name, parameter in block.named_parameters():
            if "norm" in name:
                rest.append(parameter.requires_grad_(True))
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(ROWS, LENGTH, seed)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for module in matrices(model):
        parametrize.remove_parametrizations(module, "weight")
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def rows(path: Path, run: Path, wire: RowWire, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    seams = Seams(wire, options.pop("codec", None))
    return train(path, run, steps=STEPS, learning_rate=LR, weight_decay=DECAY, seams=seams, **options)


@pytest.mark.parametrize("by_factors", [False, True])
def test_a_trained_family_of_its_own_is_what_plain_pytorch_trains(
    by_factors: bool, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Gradients of another layout are caught, whole or by their factors; slots are made of two families."""
    path = model_dir("llama")
    wire = RowWire(ends=not by_factors, by_factors=by_factors)
    losses, weights = rows(path, tmp_path / "run", wire, compute_dtype="float32", adjust=SPLIT)
    expected, merged = plain_rows(path, ends=not by_factors)
    assert losses == pytest.approx(expected, rel=2e-6)
    for name, want in merged.items():
        torch.testing.assert_close(weights[name], want, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


PLACEMENTS = FAR_PLACEMENTS | {
    "a device, some late": {"adjust": {"late_units": (0, 2), "device_update_every": 2}, "device_memory": "1GiB"},
}


@pytest.mark.parametrize("placement", sampled(PLACEMENTS))
def test_placement_changes_nothing(placement: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, options = model_dir("llama", "bfloat16"), dict(PLACEMENTS[placement])
    wire = RowWire(frozen=(3,))
    losses, weights = rows(path, tmp_path / "base", wire, codec=GroupedCodec(), adjust=SPLIT)
    adjust = SPLIT | options.pop("adjust")
    again, other = rows(path, tmp_path / "other", wire, codec=GroupedCodec(), adjust=adjust, **options)
    assert again == losses
    for name, want in weights.items():
        assert torch.equal(other[name], want), f"{name} differs"


def test_coded_weights_are_trained_upon_and_exported_as_compute_sees_them(
    model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """A directory of the decoded weights, trained by plain PyTorch, is what a run upon the coded ones gives."""
    path, decoded = model_dir("llama"), tmp_path / "decoded"
    codec, frozen = GroupedCodec(), RowWire(ends=True, frozen=(1, 2, 3, 4))
    with Engine.open(path, options(tmp_path / "run0", compute_dtype="float32"), seams=Seams(frozen, codec)) as engine:
        families = engine.store.manifest.units[1].families
        assert [(each.name, each.durability) for each in families] == [(WEIGHTS, Durability.ONCE)]
        assert families[0].num_bytes < engine.chain.layouts[1].num_elements * 1.2, "as coded, not as compute reads them"
        engine.save_pretrained(decoded)
    stored, found = load_file(path / "model.safetensors"), load_file(decoded / "model.safetensors")
    changed = {name for name in stored if not torch.equal(stored[name], found[name])}
    assert changed == {name for name in stored if ".layers." in name}, "blocks are coded, what is around them is not"
    losses, weights = rows(path, tmp_path / "run", RowWire(), codec=codec, compute_dtype="float32", adjust=SPLIT)
    # Vectors are trained as they came: the wire takes them before they are coded.
    expected, merged = plain_rows(path, ends=True, weights={key: each for key, each in found.items() if "norm" not in key})
    assert losses == pytest.approx(expected, rel=2e-6)
    for name, want in merged.items():
        torch.testing.assert_close(weights[name], want, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_a_frozen_unit_has_no_gradient_no_states_and_no_second_slot(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Only blocks 2 and 4 are trained, and nothing around the blocks: all else is exported byte for byte as it came."""
    path = model_dir("llama")
    seen: list[Any] = []

    def look(engine: Engine) -> None:
        seen.extend((engine.plan, engine.store.manifest))

    wire = RowWire(ends=False, frozen=(1, 3))
    losses, weights = rows(path, tmp_path / "run", wire, adjust=SPLIT, inspect=look)
    plan, manifest = seen
    assert plan.trained_units == (2, 4)
    families = [[family.name for family in unit.families] for unit in manifest.units]
    assert families == [[WEIGHTS], [WEIGHTS], [WEIGHTS, TRAINED, STATES], [WEIGHTS], [WEIGHTS, TRAINED, STATES], [WEIGHTS]]
    assert losses[-1] < losses[0]
    before = load_file(path / "model.safetensors")
    changed = {name.split(".")[2] for name, tensor in before.items() if not torch.equal(weights[name], tensor)}
    assert changed == {"1", "3"}


def options(run: Path, **more: Any) -> headrace.Options:
    values = {"host_memory": "4GiB", "max_grad_norm": 0.5, "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    return headrace.Options(output=run, learning_rate=LR, weight_decay=DECAY, **(values | more))


@pytest.mark.parametrize("device_memory", [None, "1GiB"])
def test_a_pass_forward_scores_rows_and_changes_nothing(
    device_memory: str | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Losses and logits between steps are those of the exported model, and the steps around them are as without."""
    path, held_out = model_dir("llama"), batch_of(ROWS, LENGTH, 99)
    more: dict[str, Any] = {"compute_dtype": "float32", "device_memory": device_memory}
    with Engine.open(path, options(tmp_path / "plain", **more)) as engine:
        undisturbed = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(4)]
    with Engine.open(path, options(tmp_path / "run", **more)) as engine:
        losses, scored = [], []
        for seed in range(4):
            losses.append(engine.step(batch_of(ROWS, LENGTH, seed)).loss)
            scored.append(engine.evaluate(held_out).loss)
        logits = engine.next_logits({"input_ids": held_out["input_ids"]})
        engine.save_pretrained(tmp_path / "out")
    assert losses == undisturbed
    assert scored[-1] != scored[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        found = model(**held_out)
    assert scored[-1] == pytest.approx(found.loss.item(), rel=1e-6)
    torch.testing.assert_close(logits, found.logits[:, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.wide
def test_a_block_that_has_its_home_on_the_device_is_a_unit_like_prologue_and_epilogue(
    model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama", "bfloat16")
    base = train(path, tmp_path / "base", adjust=SPLIT)

    def at_home(plan: Any) -> Any:
        return tuple(replace(unit, home=DEVICE) if index in (1, 3) else unit for index, unit in enumerate(plan.units))

    for device_memory, policy in ((None, "deferred"), ("1GiB", "immediate")):
        late = (lambda plan: plan.trained_units) if policy == "deferred" else ()
        adjust = SPLIT | {"units": at_home, "update_policy": policy, "late_units": late}
        run = tmp_path / policy
        losses, weights = train(path, run, adjust=adjust, device_memory=device_memory)
        assert losses == base[0]
        for name, want in base[1].items():
            assert torch.equal(weights[name], want), f"{policy}, {device_memory}: {name} differs"


def test_a_run_goes_on_with_the_seams_that_it_began_with(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, run, wire = model_dir("llama", "bfloat16"), tmp_path / "run", RowWire()
    whole, weights = rows(path, tmp_path / "whole", wire, codec=GroupedCodec(), max_grad_norm=0.5)
    with Engine.open(path, options(run), seams=Seams(wire, GroupedCodec())) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, 0)).loss]
    for seams in (Seams(), Seams(wire), Seams(codec=GroupedCodec())):
        with pytest.raises(RunDirectoryError, match=r"the run was begun with .* resume it with what it was begun with"):
            Engine.resume(run, seams=seams)
    with Engine.resume(run, seams=Seams(wire, GroupedCodec())) as engine:
        losses += [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in (1, 2)]
        engine.save_pretrained(tmp_path / "out")
    assert losses == whole
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name])


def test_a_wire_that_trains_nothing_is_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trains nothing"):
        Engine.open(model_dir("llama"), options(tmp_path / "run"), seams=Seams(RowWire(ends=False, frozen=(1, 2, 3, 4))))
    assert not (tmp_path / "run").exists()


@pytest.mark.deep
def test_matrices_that_lie_transposed_give_their_factors_too(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's Conv1D: no whole gradient of a matrix is made, and what is trained is the same to rounding."""
    path, taken = model_dir("gpt2-dropout"), set[str]()
    take = Factors.__init__

    def noted(self: Factors, layout: Any, weights: Any, taking: Any, names: Any) -> None:
        take(self, layout, weights, lambda name, *given: (taken.add(name), taking(name, *given)), names)

    monkeypatch.setattr(Factors, "__init__", noted)
    common: dict[str, Any] = {"compute_dtype": "float32", "adjust": SPLIT}
    losses, weights = rows(path, tmp_path / "factors", RowWire(by_factors=True), **common)
    whole, other = rows(path, tmp_path / "whole", RowWire(by_factors=False), **common)
    assert len(taken) == 3 * 4
    assert losses == pytest.approx(whole, rel=2e-6)
    for name, want in other.items():
        torch.testing.assert_close(weights[name], want, rtol=2e-4, atol=5e-5, msg=lambda text, name=name: f"{name}: {text}")
