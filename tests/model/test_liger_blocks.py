"""Liger's kernels are worn by blocks, one call at a time, and leave no trace. The kernels here are fakes: there is no GPU."""

import sys
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from tiny_architectures import CONFIGS, make_config
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from headrace.model import Chain
from headrace.model.chain import liger
from headrace.model.chain.liger import LigerBlocks, check_liger
from headrace.model.trials.block_major import compare_gradients
from headrace.model.trials.instance import tiny_runner, tiny_samples
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import ConfigError
from headrace.terms.options.optimizer import Optimizer

CALLS: list[str] = []


def fused_norm(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    CALLS.append("norm")
    scale = hidden.float().square().mean(-1, keepdim=True).add(self.variance_epsilon).rsqrt() * (1 + self.offset)
    return self.weight * (hidden.float() * scale).to(hidden.dtype)


def fused_product(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    CALLS.append("product")
    gate = self.gate_proj(hidden)
    return self.down_proj(gate * gate.sigmoid() * self.up_proj(hidden))


def fused_rotation(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
    CALLS.append("rotation")
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = q.shape[-1] // 2
    return tuple(x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))


class FakeRMSNorm(torch.nn.Module):
    """Stands in the model's own code where its class was, as Liger does it."""


def apply_to_llama(
    rope: bool = True,
    cross_entropy: bool = True,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Any = None,
) -> None:
    """Patches in the ways in which Liger does: names of transformers' module, attributes and methods of instances."""
    assert not cross_entropy
    assert not fused_linear_cross_entropy
    assert rope
    assert rms_norm
    assert swiglu
    modeling_llama.apply_rotary_pos_emb = fused_rotation
    modeling_llama.LlamaRMSNorm = FakeRMSNorm
    norms = [module for module in model.modules() if isinstance(module, LlamaRMSNorm)]
    for norm in norms:
        norm.offset = 0.0
        norm.__dict__["forward"] = MethodType(fused_norm, norm)
    for layer in model.model.layers:
        layer.mlp.__dict__["forward"] = MethodType(fused_product, layer.mlp)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package `liger_kernel` that knows Llama."""
    functions: dict[str, Any] = {"llama": apply_to_llama}
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["liger_kernel.transformers.monkey_patch"].MODEL_TYPE_TO_APPLY_LIGER_FN = functions  # type: ignore[attr-defined]
    CALLS.clear()
    return functions


def llama() -> Any:
    config = make_config(CONFIGS["llama"])
    return tiny_runner(type(config), architecture_key(config))


@pytest.mark.usefixtures("package")
def test_every_block_runs_by_the_kernels_and_computes_the_same() -> None:
    runner = llama()
    blocks = LigerBlocks(runner.model, runner.blocks)
    assert blocks.describe() == "LlamaAttention, LlamaMLP, 2 LlamaRMSNorm"
    assert compare_gradients(runner, blocks, tiny_samples(runner.model)) == ""
    passes = 2 * 2 * len(runner.blocks)  # two samples, forward and recompute
    assert [CALLS.count(kind) for kind in ("norm", "rotation", "product")] == [2 * passes, passes, passes]


@pytest.mark.usefixtures("package")
def test_they_are_checked_on_a_tiny_instance() -> None:
    config = make_config(CONFIGS["llama"])
    assert liger._why_not(config, "cpu") == ""
    assert CALLS


@pytest.mark.usefixtures("package")
def test_nothing_else_wears_them() -> None:
    runner, names = llama(), dict(vars(modeling_llama))
    inside = {module: set(vars(module)) for module in runner.model.modules()}
    blocks = LigerBlocks(runner.model, runner.blocks)
    compare_gradients(runner, blocks, tiny_samples(runner.model))
    assert vars(modeling_llama) == names
    assert {module: set(vars(module)) for module in runner.model.modules()} == inside
    CALLS.clear()
    sample = tiny_samples(runner.model)[0]
    runner.model(input_ids=sample.input_ids)  # the model's own code, the final norm included
    assert CALLS == []


@pytest.mark.usefixtures("package")
def test_a_block_that_fails_takes_them_off_too() -> None:
    runner = llama()
    blocks = LigerBlocks(runner.model, runner.blocks)
    with pytest.raises(TypeError):
        blocks(runner.blocks[0], torch.zeros(1, 4, 64), (), {"position_embeddings": None})
    assert "forward" not in vars(runner.blocks[0].mlp)


@pytest.mark.usefixtures("package")
def test_a_kernel_that_computes_something_else_is_refused() -> None:
    def wrong(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return fused_product(self, hidden.detach()) if hidden.requires_grad else fused_product(self, hidden)

    runner = llama()
    blocks = LigerBlocks(runner.model, runner.blocks)
    for worn in blocks._worn.values():
        for module, changes in worn.items():
            if isinstance(module, LlamaMLP):
                changes["forward"] = MethodType(wrong, module)
    assert "gradient of " in compare_gradients(runner, blocks, tiny_samples(runner.model))


@pytest.mark.usefixtures("package")
def test_an_architecture_it_does_not_know_is_refused() -> None:
    config = make_config(CONFIGS["gpt2"])
    runner = tiny_runner(type(config), architecture_key(config))
    with pytest.raises(
        ConfigError, match=r"replaces nothing in the blocks of GPT2LMHeadModel \(model_type 'gpt2'\); leave liger"
    ):
        LigerBlocks(runner.model, runner.blocks)


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="its kernels run on a GPU, but this run computes on the cpu; leave liger out"):
        check_liger(make_config(CONFIGS["llama"]), torch.device("cpu"))


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"package liger_kernel cannot be used.*pip install liger-kernel"):
        check_liger(make_config(CONFIGS["llama"]), torch.device("cuda"))


@pytest.mark.usefixtures("package")
def test_a_chain_with_them_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr("headrace.model.chain.chain.check_liger", lambda config, device: checked.append(str(device)))
    chain = Chain.from_config(make_config(CONFIGS["llama"]), "float32", Optimizer())
    chain.use_liger()
    assert checked == ["cpu"]
    assert not chain.replayable
    assert "LlamaMLP" in chain.notes[0]
    assert "no operator output is kept or skipped" in chain.notes[0]
