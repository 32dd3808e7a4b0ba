"""LSP-Offload through the engine: against plain AdamW, against a loop in float64, wherever planes live, and cut short."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import FAR_PLACEMENTS, LENGTH, ROWS, SPLIT, batch_of, exported, train
from plan_changes import changed
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

import headrace
from headrace.ask import planner as planner_module
from headrace.engine import subject
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.flow.step import settle as settling
from headrace.machine.host_memory import huge_page_buffer
from headrace.plan.forecast.footprint import merging_bytes
from headrace.store import StateStore
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.update.projectors import Projector
from headrace.update.projectors.projector import Scattered, Sides
from headrace.update.wires import Lsp, LspWire
from headrace.update.wires import subspace as subspace_module

LR, DECAY = 1e-2, 0.1


class PermutationKind:
    """Projectors of full size with one number in each row: another order of rows and columns."""

    name = "permutation"
    keeps_positions = True

    def dimension(self, side: int, dimension: int) -> int | None:
        return side

    def projector(self, values: Tensor, positions: Tensor | None, dimension: int) -> Projector:
        assert positions is not None
        return Scattered(values, positions, dimension)

    def fit(
        self, gradient: Tensor, dimensions: Sides[int], nonzeros: int, generator: torch.Generator
    ) -> Sides[tuple[Tensor, Tensor | None]]:
        stack = gradient.shape[0]

        def side(rows: int) -> tuple[Tensor, Tensor]:
            orders = torch.stack([torch.randperm(rows, generator=generator) for _ in range(stack)])
            return torch.ones(stack, rows, 1), orders[:, :, None]

        return Sides(side(gradient.shape[1]), side(gradient.shape[2]))


@pytest.mark.parametrize(
    ("compute_dtype", "max_grad_norm"), [("bfloat16", 0.5), pytest.param("float32", None, marks=pytest.mark.deep)]
)
def test_permutations_in_place_of_projectors_are_plain_adamw_bit_for_bit(
    compute_dtype: str, max_grad_norm: float | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Weights are rewritten after each step; gradients are compressed whole, as plain training sums them."""
    path = model_dir("llama")
    common: dict[str, Any] = {"compute_dtype": compute_dtype, "gradient_dtype": "float32", "max_grad_norm": max_grad_norm}
    common |= {"adjust": SPLIT, "learning_rate": LR, "weight_decay": DECAY}
    losses, weights = train(path, tmp_path / "plain", **common)
    wire = LspWire(Lsp(rewrite="step", nonzeros=1), kind=PermutationKind(), by_factors=False)
    again, other = train(path, tmp_path / "lsp", seams=Seams(wire), **common)
    assert again == losses
    for name, want in weights.items():
        assert torch.equal(other[name], want), f"{name} differs"


# -- a loop of its own ------------------------------------------------------------------------------------------------------


def leading(matrix: np.ndarray, dimension: int, nonzeros: int) -> np.ndarray:
    """Return the projector of one side: in each group of rows the leading left singular vectors."""
    rows, groups = matrix.shape[0], dimension // nonzeros
    projector = np.zeros((rows, dimension))
    for group in range(groups):
        part = slice(group * rows // groups, (group + 1) * rows // groups)
        vectors = np.linalg.svd(matrix[part], full_matrices=False)[0]
        projector[part, group * nonzeros : (group + 1) * nonzeros] = vectors[:, :nonzeros]
    return projector


def fitted(gradient: np.ndarray, dimension: int, nonzeros: int) -> tuple[np.ndarray, np.ndarray]:
    left, right = (np.eye(side) for side in gradient.shape)
    wide = [side > dimension for side in gradient.shape]
    if not wide[1]:
        return leading(gradient, dimension, nonzeros), right
    for _ in range(2):
        left = leading(gradient @ right, dimension, nonzeros) if wide[0] else left
        right = leading((left.T @ gradient).T, dimension, nonzeros)
        if not wide[0]:
            return left, right
    return leading(gradient @ right, dimension, nonzeros), right


def off(pair: tuple[np.ndarray, np.ndarray], gradient: np.ndarray) -> float:
    left, right = pair
    return float(np.linalg.norm(left @ left.T @ gradient @ right @ right.T - gradient) / np.linalg.norm(gradient))


class Adam:
    """AdamW's direction, in float64."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.m, self.v, self.t = np.zeros(shape), np.zeros(shape), 0

    def __call__(self, gradient: np.ndarray) -> np.ndarray:
        self.t += 1
        self.m += 0.1 * (gradient - self.m)
        self.v = 0.95 * self.v + 0.05 * gradient * gradient
        return (self.m / (1 - 0.9**self.t)) / (np.sqrt(self.v / (1 - 0.95**self.t)) + 1e-8)


def reference(
    path: Path, batches: Sequence[dict[str, Tensor]], *, dimension: int, nonzeros: int, check: int, alpha: float
) -> tuple[list[float], dict[str, Tensor], int]:
    """Return losses, weights and the number of changed projectors of LSP-Offload in plain PyTorch and numpy, in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).train()
    names = dict(model.named_parameters())
    inner = [name for name, p in names.items() if ".layers." in name and p.dim() == 2 and max(p.shape) > dimension]
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    adams: dict[str, Adam] = {}
    losses, changes = [], 0
    for step, batch in enumerate(batches):
        sums = {name: np.zeros(tuple(p.shape)) for name, p in names.items()}
        last: dict[str, np.ndarray] = {}
        total = 0.0
        trained = int((batch["labels"][:, 1:] != -100).sum())
        for start in range(0, ROWS, 2):
            rows = {key: value[start : start + 2] for key, value in batch.items()}
            model.zero_grad()
            count = int((rows["labels"][:, 1:] != -100).sum())
            loss = model(**rows).loss * count / trained
            loss.backward()
            total += loss.item()
            last = {name: p.grad.numpy().copy() for name, p in names.items()}
            for name, gradient in last.items():
                sums[name] += gradient
        losses.append(total)
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name in inner:
            block = int(name.split(".")[2])
            if step == 0:
                pairs[name] = fitted(sums[name], dimension, nonzeros)
            elif step % check == block % check and off(pairs[name], last[name]) > alpha:
                new = fitted(sums[name] - last[name], dimension, nonzeros)
                if off(new, last[name]) < 0.95 * off(pairs[name], last[name]):
                    found[name] = new
        for name, p in names.items():
            decay = DECAY if p.dim() >= 2 and "norm" not in name else 0.0
            gradient = sums[name]
            if name in pairs:
                gradient = pairs[name][0].T @ gradient @ pairs[name][1]
            direction = adams.setdefault(name, Adam(gradient.shape))(gradient)
            if name in pairs:
                direction = pairs[name][0] @ direction @ pairs[name][1].T
            with torch.no_grad():
                p.mul_(1 - LR * decay).sub_(torch.from_numpy(LR * direction))
        for name, new in found.items():
            changes += 1
            a, b = new[0].T @ pairs[name][0], pairs[name][1].T @ new[1]
            adams[name].m, adams[name].v = a @ adams[name].m @ b, (a * a) @ adams[name].v @ (b * b)
            pairs[name] = new
    return losses, {name: p.detach() for name, p in names.items()}, changes


@pytest.mark.wide
@pytest.mark.parametrize("rewrite", ["refit", pytest.param("step", marks=pytest.mark.deep)])
def test_a_loop_of_its_own_in_float64_gives_the_same(rewrite: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Fits, held-out checks, changes of projectors, decay and the moving of states, over six steps."""
    path, batches = model_dir("llama"), [batch_of(ROWS, LENGTH, seed) for seed in range(6)]
    # An embedding alike for many tokens has a gradient that is no noise: projectors that were tried are better, or not.
    expected, merged, changes = reference(path, batches, dimension=48, nonzeros=4, check=2, alpha=0.2)
    assert 0 < changes < 4 * 7 * 3
    wire = LspWire(Lsp(dimension=48, nonzeros=4, check=2, alpha=0.2, rewrite=rewrite))
    losses, weights = train(
        path,
        tmp_path / "run",
        steps=6,
        learning_rate=LR,
        weight_decay=DECAY,
        compute_dtype="float32",
        adjust=SPLIT,
        seams=Seams(wire),
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, want in merged.items():
        torch.testing.assert_close(
            weights[name].double(), want, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


# -- placements, cuts -------------------------------------------------------------------------------------------------------

EVERY_TWO = "lsp:dimension=32,nonzeros=4,check=2,alpha=0.1"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "placement"),
    [
        ("mixtral-aux", "a device, states in memory, late"),
        *(
            pytest.param(*each, marks=pytest.mark.deep)
            for each in (("llama", "SSD, plain"), ("mixtral-aux", "SSD, plain"), ("llama", "a device, states in memory, late"))
        ),
    ],
)
def test_placement_changes_nothing(model: str, placement: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, options = model_dir(model, "bfloat16"), dict(FAR_PLACEMENTS[placement])
    common: dict[str, Any] = {"gradient": EVERY_TWO, "steps": 4, "learning_rate": LR}
    losses, weights = train(path, tmp_path / "base", adjust=SPLIT, **common)
    again, other = train(path, tmp_path / "other", adjust=SPLIT | options.pop("adjust"), **common, **options)
    assert again == losses
    for name, want in weights.items():
        assert torch.equal(other[name], want), f"{name} differs"


class Cut(Exception):
    """Stands for a crash."""


def opened(path: Path, run: Path, **more: Any) -> Engine:
    options = {"host_memory": "4GiB", "max_grad_norm": 0.5, "tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH}
    options |= {"gradient": EVERY_TWO, "learning_rate": LR, "weight_decay": DECAY, "compute_dtype": "float32"} | more
    return Engine.open(path, headrace.Options(output=run, **options), adjust_plan=split)


def split(plan: Any) -> Any:

    return changed(plan, **SPLIT)


# Where a step is cut: before its check's settling, in the middle of a unit of it, before its commit, and right after that.
CUTS = ("before", "within", "before the commit", "after the commit")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("cut", "rewrite"),
    [
        ("within", "refit"),
        ("before the commit", "step"),
        *(
            pytest.param(cut, rewrite, marks=pytest.mark.deep)
            for cut in CUTS
            for rewrite in ("refit", "step")
            if (cut, rewrite) not in (("within", "refit"), ("before the commit", "step"))
        ),
    ],
)
def test_cut_short_anywhere_it_goes_on_to_the_same_bytes(
    cut: str, rewrite: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gradient = model_dir("llama"), f"{EVERY_TWO},rewrite={rewrite}"
    with opened(path, tmp_path / "whole", gradient=gradient) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(4)]
        assert engine.store.record["num_steps"] == 4
        weights = exported(engine, tmp_path / "whole-out")
    run = tmp_path / "run"
    settle, settle_unit, commit = settling.settle, settling._settle_unit, StateStore.commit
    count = 0

    def cutting(*given: Any, **more: Any) -> None:
        nonlocal count
        count += 1
        if count < 2 and rewrite == "step":  # the first one has no change of projectors
            settle(*given)
            return
        if cut == "before":
            raise Cut
        if cut == "within":
            monkeypatch.setattr(settling, "_settle_unit", cut_unit)
        if cut == "before the commit":
            monkeypatch.setattr(StateStore, "commit", cut_commit)
        settle(*given)
        raise Cut

    def cut_unit(*given: Any, **more: Any) -> None:
        settle_unit(*given, **more)
        raise Cut

    def cut_commit(self: StateStore, record: Any) -> None:
        raise Cut

    monkeypatch.setattr(subject, "settle", cutting)
    engine = opened(path, run, gradient=gradient)

    def steps() -> None:
        for seed in range(4):
            engine.step(batch_of(ROWS, LENGTH, seed))

    with pytest.raises(Cut):
        steps()
    monkeypatch.setattr(settling, "_settle_unit", settle_unit)
    monkeypatch.setattr(StateStore, "commit", commit)
    monkeypatch.setattr(subject, "settle", settle)
    engine._shut_down()
    engine._closers.close()  # without a commit, as a killed process
    with Engine.resume(run) as engine:
        done = engine.step_index
        assert 0 < done < 4
        rest = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(done, 4)]
        assert rest == losses[done:]
        for name, tensor in exported(engine, tmp_path / "out").items():
            assert torch.equal(tensor, weights[name]), f"{name} differs"


@pytest.mark.wide
def test_an_export_between_changes_is_one_after_a_merge(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, held_out = model_dir("llama", "bfloat16"), batch_of(ROWS, LENGTH, 99)
    with opened(path, tmp_path / "run", compute_dtype="bfloat16") as engine:
        for seed in range(2):
            engine.step(batch_of(ROWS, LENGTH, seed))
        before = exported(engine, tmp_path / "before")
        scored = engine.evaluate(held_out).loss
        engine.flush()
        engine._drop_buffers()
        wire = LspWire(Lsp(dimension=32, nonzeros=4, rewrite="step"))
        settling.settle(engine.store, engine._subject.maker, wire, engine.store.record)
        after = exported(engine, tmp_path / "after")
        assert engine.evaluate(held_out).loss == pytest.approx(scored, rel=1e-3)
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name]), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in load_file(path / "model.safetensors").items())


def test_a_run_goes_on_with_the_projectors_that_it_began_with(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with opened(model_dir("llama"), tmp_path / "run") as engine:
        engine.step(batch_of(ROWS, LENGTH, 0))
    for other in (Seams(), Seams(LspWire(Lsp(dimension=32, nonzeros=4, check=2, alpha=0.1, projector="random")))):
        with pytest.raises(RunDirectoryError, match="the run was begun with lsp:"):
            Engine.resume(tmp_path / "run", seams=other)


def test_a_rule_whose_states_cannot_be_moved_is_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    for optimizer in ("adamw:moments=int8", "adamw:moments=bfloat16"):
        with pytest.raises(ConfigError, match="lsp moves a rule's states to other projectors"):
            opened(model_dir("llama"), tmp_path / "run", optimizer=optimizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("gradient", "said"),
    [
        ("lsp:dimension=16,nonzeros=17", "nonzeros: 17 in each row of a projector, which has 16 columns"),
        ("lsp:dimension=4096", "no matrix of a block has a side longer than a subspace's"),
    ],
)
def test_subspaces_that_cannot_be_are_refused(gradient: str, said: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(model_dir("llama"), tmp_path / "run", gradient=gradient)
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
def test_a_run_goes_on_with_the_dimension_that_its_plan_chose(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the side, or a quarter where host memory does not hold the states of half; another is refused."""
    path = model_dir("llama")
    monkeypatch.setattr(subspace_module, "_ROUNDED_TO", 16)
    for holds, dimension in ((True, 32), (False, 16)):
        monkeypatch.setattr(planner_module, "holds_states", lambda problem, holds=holds: holds)
        run = tmp_path / f"run{dimension}"
        with opened(path, run, gradient="lsp:check=2") as engine:
            assert engine.store.manifest.identity["wire"] == f"lsp:dimension={dimension},check=2"
            engine.step(batch_of(ROWS, LENGTH, 0))
        monkeypatch.setattr(planner_module, "holds_states", lambda problem, holds=holds: not holds)
        with Engine.resume(run) as engine:
            assert engine.step_index == 1
        with pytest.raises(RunDirectoryError, match="wire: the run was begun with"):
            Engine.resume(run, seams=Seams(LspWire(Lsp(dimension=48))))


class Live(TorchDispatchMode):
    """Counts the bytes that are alive of buffers that `buffer` gave, and of tensors that were made inside, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._buffers: dict[int, int] = {}
        self._known: set[int] = set()

    def _add(self, owner: Any, num_bytes: int, forget: Callable[[], Any]) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self.live -= num_bytes
            forget()

        weakref.finalize(owner, freed)

    def buffer(self, num_bytes: int) -> np.ndarray:
        found = huge_page_buffer(num_bytes)
        begin = found.ctypes.data
        self._buffers[begin] = num_bytes
        self._add(found.base, num_bytes, lambda: self._buffers.pop(begin))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if not isinstance(each, Tensor):
                continue
            storage = each.untyped_storage()
            at, key = storage.data_ptr(), storage._cdata
            if key in given or key in self._known or any(b <= at < b + size for b, size in self._buffers.items()):
                continue
            self._known.add(key)
            self._add(storage, storage.nbytes(), partial(self._known.discard, key))
        return out


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_merge_between_steps_takes_no_more_than_is_planned(
    dtype: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Live] = []
    settle = settling.settle

    def counted(*given: Any, **more: Any) -> None:
        with Live() as live:
            monkeypatch.setattr(settling, "huge_page_buffer", live.buffer)
            settle(*given, **more)
        seen.append(live)

    monkeypatch.setattr(subject, "settle", counted)
    options = {"compute_dtype": dtype, "gradient": "lsp:dimension=32,check=2,alpha=0,rewrite=step", "learning_rate": LR}
    with opened(model_dir("llama"), tmp_path / "run", **options) as engine:
        for step in range(3):
            engine.step(batch_of(ROWS, LENGTH, step))
        assert engine.plan is not None
        assert "merging between steps" in engine.plan.results.peak_bytes["host"]
        planned = merging_bytes(engine.plan)
    assert len(seen) == 3
    assert planned // 2 < max(live.peak for live in seen) <= planned
