"""A coded model run by the engine: its blocks lie on the drive in the parts that they came in, and are decoded for compute.

Run: pytest tests/compress/test_frozen.py
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coded_models import KINDS, write_coded
from compressing import run_to_words
from safetensors.torch import load_file
from test_compression import decoded
from tiers import sampled
from transformers import AutoModelForCausalLM

import headrace
from headrace.ask.answer import plan_model
from headrace.compress.decompression import decompress_model
from headrace.engine import Engine, Seams
from headrace.engine.seams import seams_of
from headrace.runs.engines import why_not_packed
from headrace.terms.errors import ConfigError
from headrace.terms.events import OpDone
from headrace.update.wires import FrozenWire


def batch_of(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 300, (4, 24), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def evaluated(model: Path, run: Path, **options: Any) -> tuple[float, int, list[OpDone]]:
    """Return the loss, the bytes on the drive of the first block, and the operations."""
    done: list[Any] = []
    given = {"output": run, "sequence_length": 24, "tokens_per_step": 96, "compute_dtype": "float32", "host_memory": "4GiB"}
    with Engine.open(model, headrace.Options(**{**given, **options}), done.append, seams=Seams(FrozenWire())) as engine:
        loss = engine.evaluate(batch_of()).loss
        assert engine.evaluate(batch_of()).loss == loss
        stored = engine.store.manifest.units[1].weights.num_bytes
    return loss, stored, [event for event in done if isinstance(event, OpDone)]


def stock_loss(model: Path) -> float:
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        return float(stock(**batch_of()).loss)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "device_memory"),
    sampled(
        itertools.product(KINDS, (None, "512MiB")),
        [("mxfp4", None), ("nf4", "512MiB"), ("zero points", None), ("fp8 experts", "512MiB")],
    ),
)
def test_the_loss_is_that_of_the_decoded_weights(kind: str, device_memory: str | None, tmp_path: Path) -> None:
    coded, expected = write_coded(tmp_path, kind)
    loss, stored, done = evaluated(coded, tmp_path / "run", device_memory=device_memory)
    plain = decompress_model(coded, tmp_path / "plain")
    # Products of scales are rounded to bfloat16 in a directory of 16 bits; the engine in float32 does not round them.
    is_rounded = kind.startswith(("fp8", "fp4", "nvfp4", "int8"))
    assert loss == pytest.approx(stock_loss(plain), rel=1e-3 if is_rounded else 2e-6)
    dense = sum(tensor.numel() for key, tensor in expected.items() if ".layers.0." in key)
    assert stored < 2 * dense, "fewer bytes than of 16 bits"
    assert any(each.verb == "make" and each.lane == "make" for each in done)
    assert not any(each.verb in ("drain", "update") for each in done)


def test_what_was_compressed_has_the_loss_that_was_said(dense_int4: Any, tmp_path: Path) -> None:
    loss, _, _ = evaluated(dense_int4[0] / "out", tmp_path / "run")
    plain = decompress_model(dense_int4[0] / "out", tmp_path / "plain")
    assert loss == pytest.approx(stock_loss(plain), rel=2e-6)
    assert loss == evaluated(plain, tmp_path / "other")[0], "decoded by the way, or before: the same bits"
    assert decoded(dense_int4[0] / "out")


def test_coded_weights_are_not_trained_in_place(dense_int4: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"block\.0: its weights are coded \(pack-quantized:32:bfloat16\), and cannot be trained"
    ):
        Engine.open(dense_int4[0] / "out", headrace.Options(output=tmp_path / "run", compute_dtype="float32"))
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
def test_a_plan_knows_what_the_files_hold(dense_int4: Any, tmp_path: Path) -> None:
    """Of coded weights the plan has their own bytes, as a run has; to train them in place is refused as a run does."""
    options = headrace.Options(
        output=tmp_path / "run", adapter="lora:rank=4", sequence_length=24, tokens_per_step=96, host_memory="4GiB"
    )
    found = plan_model(dense_int4[0] / "out", options)
    with Engine.open(dense_int4[0] / "out", options) as engine:
        assert found.plan is not None
        assert engine.plan is not None
        # What is not coded lies in a run as in the files, if it can be read there.
        assert found.plan.units[1:-1] == engine.plan.units[1:-1]
        assert all(unit.stored_bytes for unit in found.plan.units[1:-1])
    with pytest.raises(ConfigError, match="and cannot be trained in place; give --adapter lora"):
        plan_model(dense_int4[0] / "out", headrace.Options(sequence_length=24, tokens_per_step=96))


def adapted(model: Path, run: Path, adapter: str = "lora:rank=4", *, parted: bool = False) -> tuple[list[float], bytes]:
    """Return losses of two steps of LoRA in bfloat16, and the bytes of what came of it: less the gradients. `parted`: experts
    come one at a time.
    """
    given = {"sequence_length": 24, "tokens_per_step": 96, "compute_dtype": "bfloat16", "host_memory": "4GiB"}
    options = headrace.Options(output=run, adapter=adapter, optimizer="sgd:momentum=0", learning_rate=1.0, **given)
    with Engine.open(model, options, seams=replace(seams_of(options), parted=parted)) as engine:
        losses = [engine.step(batch_of(seed)).loss for seed in range(2)]
        engine.save_pretrained(run / "adapter")
    file = run / "adapter" / "adapter_model.safetensors"
    assert all(tensor.any() for tensor in load_file(file).values()), "all have had a gradient"
    return losses, file.read_bytes()


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(tuple(KINDS), ("nf4", "fp8")))
def test_adapters_upon_published_codes_are_those_upon_decoded_weights(kind: str, tmp_path: Path) -> None:
    """Forward, recompute and gradients of inputs see the decoded bits, so adapters end with the same ones."""
    coded, _ = write_coded(tmp_path, kind)
    plain = decompress_model(coded, tmp_path / "plain")
    assert adapted(coded, tmp_path / "run") == adapted(plain, tmp_path / "other")


@pytest.mark.wide
def test_adapters_upon_what_was_compressed_are_those_upon_decoded_weights(dense_int4: Any, tmp_path: Path) -> None:
    plain = decompress_model(dense_int4[0] / "out", tmp_path / "plain")
    assert why_not_packed(dense_int4[0] / "out", 24) == "", "asked first by the command"
    assert adapted(dense_int4[0] / "out", tmp_path / "run") == adapted(plain, tmp_path / "other")


@pytest.mark.deep
def test_adapters_upon_ternary_experts_are_those_upon_decoded_weights(mixture: Path, tmp_path: Path) -> None:
    run_to_words(mixture, tmp_path)
    coded = tmp_path / "out"
    assert adapted(coded, tmp_path / "run") == adapted(decompress_model(coded, tmp_path / "plain"), tmp_path / "other")


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(("int4", "mxfp4", "fp8 experts", "ternary"), ("int4",)))
def test_coded_experts_that_come_singly_are_trained_upon_as_in_their_blocks(
    kind: str, mixture: Path, mixture_int4: Any, tmp_path: Path
) -> None:
    coded, adapter = mixture_int4[0] / "out", "lora:rank=4,target_modules=q_proj+experts"
    if kind in KINDS:
        coded, _ = write_coded(tmp_path, kind)
    elif kind == "ternary":
        run_to_words(mixture, tmp_path)
        coded = tmp_path / "out"
    assert adapted(coded, tmp_path / "run", adapter, parted=True) == adapted(coded, tmp_path / "other", adapter)
