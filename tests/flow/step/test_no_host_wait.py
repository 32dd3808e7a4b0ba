"""A step never asks the device for a value while it issues work: on a GPU that would stop the host until all of it is done.

On a CPU nobody would notice, so it is looked for: an operator that gives a value to the host, or whose result's shape depends
on values, and the ways around operators (`tolist`, `numpy`, a copy to the host) by which Python gets at one.
"""

import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_changes import changed
from tiers import sampled
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.flow.step import step
from headrace.terms.program import Verb

_aten = torch.ops.aten
# Their results come to the host, or have shapes that only the device knows.
WAITING = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
    _aten._unique2.default,
    _aten.repeat_interleave.Tensor,
}
COMPUTE = [Verb.PROLOGUE, Verb.FORWARD, Verb.EPILOGUE, Verb.BACKWARD, Verb.PROLOGUE_BACKWARD]
LENGTH, ROWS = 16, 4


class Waits(TorchDispatchMode):
    """Writes down which operation of a step waits, for what, and on which line."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.verb = ""
        self.thread = threading.get_ident()

    def note(self, what: str) -> None:
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "/torch/" not in frame.filename and frame.filename != __file__ and frame.name != "__torch_function__"
        ]
        self.found.append(f"{self.verb}: {what}, asked for in {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in WAITING:
            self.note(str(func))
        if func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.note(f"{func} with a mask")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    """What waits in the operations of the compute lane."""
    mode = Waits()
    for verb in COMPUTE:

        def handler(state: Any, op: Any, own: Any = step.HANDLERS[verb], verb: Verb = verb) -> None:
            mode.verb = str(verb)
            with mode:
                own(state, op)
            mode.verb = ""

        monkeypatch.setitem(step.HANDLERS, verb, handler)
    for name in ("tolist", "numpy", "cpu"):
        own = getattr(torch.Tensor, name)

        def method(self: Any, *args: Any, own: Any = own, name: str = name, **options: Any) -> Any:
            if mode.verb and threading.get_ident() == mode.thread:
                mode.note(name)
            return own(self, *args, **options)

        monkeypatch.setattr(torch.Tensor, name, method)
    return mode


def save(path: Path, model_type: str, **changes: Any) -> Path:
    shape = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape, **changes)).save_pretrained(path)
    return path


def run(path: Path, run_directory: Path, **options: Any) -> None:
    """Two steps, in the ways that issue most: several micro-batches, kept outputs, all kinds of batches."""

    def adjust(plan: Any) -> Any:
        kept = tuple(tuple(range(len(names))) for names in plan.stash.operators)
        return changed(plan, micro_batch_sequences=2, num_micro_batches=2, accumulate=True, kept=kept)

    with Engine.open(
        path,
        headrace.Options(
            host_memory="4GiB",
            output=run_directory,
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
            max_grad_norm=1.0,
            **options,
        ),
        adjust_plan=adjust,
    ) as engine:
        for kind in ("plain", "packed"):
            ids = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 120
            batch = {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids)}
            if kind == "packed":
                batch["position_ids"] = (torch.arange(LENGTH) % (LENGTH // 2)).expand(ROWS, LENGTH)
            engine.step(batch)


@pytest.mark.parametrize("name", sampled(["llama", "gemma3_text", "gpt_neox"]))
def test_compute_never_waits_for_a_value(name: str, tmp_path: Path, waits: Waits) -> None:
    changes: dict[str, Any] = {"head_dim": 16, "sliding_window": 8} if name == "gemma3_text" else {}
    run(save(tmp_path / "model", name, **changes), tmp_path / "run")
    assert [found for found in waits.found if not found.startswith("prologue")] == []
    # Masks are made after a look at the positions, by transformers: at a step's two ends, where nothing is waited for.
    assert all("masking_utils.py" in found for found in waits.found)


@pytest.mark.parametrize(
    "reach", sampled([lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.tolist(), lambda x: x[x > 0]])
)
def test_a_wait_is_found(reach: Callable[[torch.Tensor], Any], tmp_path: Path, waits: Waits, monkeypatch: Any) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        if not isinstance(hidden, FakeTensor):  # those have no values: planning would find it out already
            reach(hidden.detach())
        return torch.nn.functional.silu(hidden)

    path = save(tmp_path / "model", "llama")
    monkeypatch.setattr("transformers.activations.SiLUActivation.forward", forward)
    run(path, tmp_path / "run")
    assert any(found.startswith("forward: ") for found in waits.found)
    assert any(found.startswith("backward: ") for found in waits.found)
