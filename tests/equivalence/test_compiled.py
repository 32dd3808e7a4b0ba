"""Training with compiled blocks is training: the same losses and weights up to rounding, two graphs for each kind of block.

Most tests generate no code (`aot_eager`: traced, differentiated ahead of time, run operator by operator), which takes seconds
and no compiler; one goes the whole way.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from test_engine import LENGTH, ROWS, batch_of, micro_batches, train
from torch._dynamo.utils import counters
from versions import COMPILES_EXPERTS

import headrace
from headrace.engine.trainer import Engine
from headrace.model.chain.compiled import CompiledBlocks, check_compiler
from headrace.plan.value.plan import Plan
from headrace.plan.value.words import explain_plan
from headrace.terms.errors import ConfigError

KINDS_OF_BLOCKS = {"llama": 1, "mixtral-aux": 1, "deepseek": 2}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile without a compiler."""
    monkeypatch.setattr("headrace.model.chain.chain.CompiledBlocks", functools.partial(CompiledBlocks, "aot_eager"))
    monkeypatch.setattr("headrace.model.chain.chain.check_compiler", lambda device: None)
    monkeypatch.setattr("headrace.model.chain.chain.check_compiles", lambda config: None)  # tests/model has it
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def assert_same(ours: tuple[Any, Any], expected: tuple[Any, Any], *, loss: float, weight: float) -> None:
    assert ours[0] == pytest.approx(expected[0], rel=loss)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(ours[1][name], tensor, rtol=0, atol=weight, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.deep),
        pytest.param("mixtral-aux", marks=[pytest.mark.deep, COMPILES_EXPERTS]),
        pytest.param("deepseek", marks=[pytest.mark.deep, COMPILES_EXPERTS]),
    ],
)
def test_losses_and_weights_are_those_of_the_models_own_code(name: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, options = model_dir(name), {"compute_dtype": "float32", "max_grad_norm": 0.5, "adjust": micro_batches(2)}
    expected = train(path, tmp_path / "own", **options)
    before = graphs()
    ours = train(path, tmp_path / "compiled", compile_blocks=True, **options)
    assert graphs() - before == 2 * KINDS_OF_BLOCKS[name]  # forward and recompute, whatever the number of blocks and steps
    # AdamW's first steps have the size of the learning rate (1e-3), whatever the gradient's: a wrong one would show as that.
    assert_same(ours, expected, loss=1e-6, weight=2e-5)


@pytest.mark.deep
@pytest.mark.usefixtures("traced")
def test_another_shape_is_another_two_graphs(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    before = graphs()
    train(model_dir("llama"), tmp_path / "run", compile_blocks=True, adjust=micro_batches(ROWS - 1))  # the last one is smaller
    assert graphs() - before == 4


def assert_nothing_kept(plan: Plan, own: Plan, *, routed: bool) -> None:
    """Compare the plan of compiled blocks with that of the model's own code, which leaves something out unless it is routed."""
    assert any(own.stash.skipped) != routed
    assert any(own.results.spared_flops) != routed
    assert not any(plan.stash.kept)
    assert not any(plan.stash.skipped)
    assert not any(plan.stash.operators)
    assert plan.results.spared_flops == (0.0,) * plan.num_blocks
    assert "note     blocks are compiled: no operator output is kept or skipped" in explain_plan(plan)


@pytest.mark.wide
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("name", "padded"), [("llama", True), pytest.param("mixtral-aux", False, marks=[pytest.mark.deep, COMPILES_EXPERTS])]
)
def test_shorter_batches_are_filled_up_and_compile_nothing_and_the_plan_says_that_it_keeps_nothing(
    name: str, padded: bool, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    losses, compiled, plans = {}, [], {}
    for option in (False, True):
        with Engine.open(
            model_dir(name),
            headrace.Options(
                host_memory="4GiB",
                learning_rate=1e-3,
                output=tmp_path / str(option),
                max_grad_norm=None,
                compute_dtype="float32",
                tokens_per_step=ROWS * LENGTH,
                sequence_length=LENGTH,
                compile_blocks=option,
            ),
        ) as engine:
            steps = []
            for seed, length in enumerate((LENGTH, LENGTH - 5, LENGTH // 2)):
                before = graphs()
                steps.append(engine.step(batch_of(ROWS, length, seed, padded=padded)))
                compiled.append(graphs() - before)
            assert engine.plan is not None
            plans[option] = engine.plan
        losses[option] = [step.loss for step in steps]
    assert losses[True] == pytest.approx(losses[False], rel=2e-6)
    assert [step.tokens for step in steps] == [ROWS * LENGTH, ROWS * (LENGTH - 5), ROWS * (LENGTH // 2)]
    assert compiled[3:] == [2, 0, 0]
    assert_nothing_kept(plans[True], plans[False], routed=name == "mixtral-aux")


@pytest.mark.deep
@pytest.mark.usefixtures("traced")
def test_a_resumed_run_compiles_again_and_ends_with_the_same_bits(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "tokens_per_step": ROWS * LENGTH,
        "sequence_length": LENGTH,
        "max_grad_norm": 1.0,
        "compile_blocks": True,
    }
    ends = []
    for broken in (False, True):
        directory, seen = tmp_path / f"run-{broken}", graphs()
        engine = Engine.open(
            model_dir("llama"), headrace.Options(host_memory="4GiB", learning_rate=1e-3, output=directory, **options)
        )
        losses = [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2)]
        if broken:
            engine.close()
            engine = Engine.resume(directory)
            assert engine.options.compile_blocks
            assert engine.store.record["options"]["compile_blocks"] is True
        losses += [engine.step(batch_of(ROWS, LENGTH, seed)).loss for seed in range(2, 4)]
        assert graphs() - seen == 2 * (1 + broken)
        engine.save_pretrained(tmp_path / f"out-{broken}")
        engine.close()
        ends.append((losses, (tmp_path / f"out-{broken}" / "model.safetensors").read_bytes()))
    assert ends[0] == ends[1]


def test_dropout_is_refused_before_anything_is_written(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compile_blocks: GPT2LMHeadModel has dropout.*Set its dropout rates to 0"):
        Engine.open(
            model_dir("gpt2-dropout"), headrace.Options(output=tmp_path / "run", max_grad_norm=None, compile_blocks=True)
        )
    assert list(tmp_path.iterdir()) == []


def test_compiling_and_liger_together_are_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        Engine.open(
            model_dir("llama"), headrace.Options(output=tmp_path / "run", max_grad_norm=None, compile_blocks=True, liger=True)
        )


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generated_code_trains_the_same(dtype: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """The whole way, with a compiler: half a minute where nothing is cached."""
    try:
        check_compiler(torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))
    path, options = model_dir("llama"), {"compute_dtype": dtype, "max_grad_norm": 0.5, "steps": 8}
    expected = train(path, tmp_path / "own", **options)
    ours = train(path, tmp_path / "compiled", compile_blocks=True, **options)
    again = train(path, tmp_path / "again", compile_blocks=True, **options)
    assert ours[0] == again[0]
    bounds = {"loss": 1e-5, "weight": 2e-4} if dtype == "float32" else {"loss": 2e-3, "weight": 8e-3}
    assert_same(ours, expected, **bounds)
