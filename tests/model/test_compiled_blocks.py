"""Which blocks can be compiled is found out before a run, on a tiny instance; what is compiled is checked there too."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from tiny_architectures import CONFIGS, DROPOUT_GPT2, flats_of, make_config, make_plain
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaMLP
from versions import COMPILES_EXPERTS

from headrace.model import BlockCall, Chain, profile
from headrace.model.chain.compiled import CompiledBlocks, check_compiler, check_compiles
from headrace.model.trials.block_major import compare_gradients
from headrace.model.trials.instance import tiny_runner, tiny_samples
from headrace.model.trials.thresholds import architecture_key
from headrace.terms.errors import ConfigError
from headrace.terms.options.optimizer import Optimizer


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", [pytest.param("qwen3", marks=pytest.mark.deep), "gpt2", pytest.param("mixtral", marks=COMPILES_EXPERTS)]
)
def test_blocks_of_this_kind_can_be_compiled(name: str) -> None:
    check_compiles(make_config(CONFIGS[name]))


@pytest.mark.wide
@COMPILES_EXPERTS
def test_router_logits_are_not_lost_after_a_model_without_them() -> None:
    """The compiler's guards do not see the hooks that catch them: one model must not run the graphs of another."""
    for name in ("mixtral", "mixtral-routed"):
        config = make_config(CONFIGS[name])
        runner = tiny_runner(type(config), architecture_key(config))
        assert compare_gradients(runner, CompiledBlocks("aot_eager"), tiny_samples(runner.model)[:1]) == ""


@pytest.mark.wide
def test_a_loop_over_experts_is_refused() -> None:
    config = make_config(CONFIGS["mixtral"])
    runner = tiny_runner(type(config), architecture_key(config))
    runner.model.set_experts_implementation("eager")
    with pytest.raises(ConfigError, match=r"compile_blocks: MixtralDecoderLayer on \(1, 13, 64\) cannot be compiled: .*leave"):
        compare_gradients(runner, CompiledBlocks("aot_eager"), tiny_samples(runner.model)[:1])


def test_a_block_that_asks_for_a_value_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if hidden.sum() > 0 else -hidden

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    config = make_config(
        ("llama", {**CONFIGS["llama"][1], "attention_bias": True})
    )  # an architecture that no other test asked for
    with pytest.raises(
        ConfigError,
        match=r"the blocks of LlamaConfig cannot be compiled: Data-dependent.*leave compile_blocks out.*transformers 5\.",
    ):
        check_compiles(config)


def test_a_compiler_that_computes_something_else_is_found_out() -> None:
    config = make_config(CONFIGS["llama"])
    runner = tiny_runner(type(config), architecture_key(config))

    def wrong(block: Any, hidden: torch.Tensor, args: Any, kwargs: Any) -> Any:
        return block(hidden, *args, **kwargs).detach() + hidden - hidden.detach()  # right forward, gradients of nothing

    assert "gradient of " in compare_gradients(runner, wrong, tiny_samples(runner.model))


@pytest.mark.wide
def test_binding_other_weights_compiles_nothing() -> None:
    config = make_config(CONFIGS["llama"])
    chain = Chain.from_config(config, "float32", Optimizer())
    flats, compiled = flats_of(chain, make_plain(config)), CompiledBlocks("aot_eager")
    cos = torch.linspace(-1, 1, 12 * 8).reshape(1, 12, 8)
    call = BlockCall((), {"position_embeddings": (cos, cos.flip(-1)), "attention_mask": None})
    before, seen = counters["stats"]["unique_graphs"], []
    for turn in range(3):
        for index in range(chain.num_blocks):
            for gradients in (False, True):
                flat = flats[index + 1] * (1 + turn)
                hidden = torch.linspace(-1, 1, 12 * 32).reshape(1, 12, 32).requires_grad_(gradients)
                results = []
                for run in (chain.runner.run_block, compiled):
                    into: dict[str, torch.Tensor] = {}
                    sink = (lambda spec, gradient, into=into: into.update({spec.name: gradient})) if gradients else None
                    chain.bind(index + 1, flat, sink)
                    with torch.set_grad_enabled(gradients):
                        out = run(chain.runner.blocks[index], hidden, call.args, call.kwargs)
                    if gradients:
                        out.backward(torch.ones_like(out))
                    chain.release(index + 1)
                    results.append((out.detach(), into))
                for name, expected in {"out": results[0][0], **results[0][1]}.items():
                    got = {"out": results[1][0], **results[1][1]}[name]
                    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-5 * float(expected.abs().max()))
                assert bool(results[1][1]) is gradients
                seen.append(results[1][0])
    assert counters["stats"]["unique_graphs"] - before == 2
    assert len({float(out.sum()) for out in seen}) == 3 * chain.num_blocks  # it was each block's own weights that were used


@pytest.mark.wide
def test_costs_name_no_operators_and_count_a_blocks_gradients_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.model.chain.chain.check_compiler", lambda device: None)
    chain = Chain.from_config(make_config(CONFIGS["llama"]), "bfloat16", Optimizer())
    own = profile(chain, 2, 16)
    chain.compile_blocks()
    before = counters["stats"]["unique_graphs"]
    compiled = profile(chain, 2, 16)
    assert counters["stats"]["unique_graphs"] == before
    for block, of_own in zip(compiled.blocks, own.blocks, strict=True):
        assert of_own.operators
        assert of_own.skippable
        assert block.operators == block.skippable == ()
        assert block.backward_workspace_bytes == of_own.backward_workspace_bytes + 2 * block.num_elements
        assert block.forward_flops == of_own.forward_flops


def test_dropout_is_refused() -> None:
    chain = Chain.from_config(make_config(DROPOUT_GPT2), "float32", Optimizer())
    with pytest.raises(ConfigError, match="has dropout"):
        chain.compile_blocks()
    assert chain.replayable


@pytest.mark.wide
def test_no_compiler_is_said_in_one_message() -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(
            ConfigError, match=r"does not work on cpu here: .*C\+\+ compiler.*install it, or leave compile_blocks out"
        ),
    ):
        check_compiler(torch.device("cpu"))


@pytest.mark.soak
def test_a_compiler_that_is_there_is_taken() -> None:
    """A minute, where torch's headers were never compiled before."""
    try:
        check_compiler(torch.device("cpu"))
    except ConfigError as error:
        if "No working C++ compiler" not in str(error):
            raise
        pytest.skip(str(error))
