"""Generating with a coded model: what stock `generate` makes of the decoded directory, of fewer bytes.

Run: pytest tests/compress/test_generate_coded.py
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answered_jobs import answered
from banked_plans import with_banks, with_whole_blocks
from coded_models import KINDS, write_coded
from compressing import run, write_data
from saved_models import add_unused
from tiers import sampled
from transformers import AutoModelForCausalLM

from headrace.cli import main
from headrace.compress.decompression import decompress_model
from headrace.engine.merging import merge_adapters
from headrace.generate.passes.asked import plan_generation
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows
from headrace.generate.passes.whose_weights import open_generator
from headrace.generate.plan.plan import GenerationPlan, generation_buffers
from headrace.generate.uses.evaluating import evaluate_model
from headrace.machine.cpu import CpuMachine
from headrace.model.kernels.products import WideProducts
from headrace.terms.errors import ConfigError
from headrace.terms.options.budget import Budget
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.sizes import PAGE_BYTES

ROWS = (tuple(range(7, 16)), tuple(range(40, 49)))
SETTINGS = {
    "max_new_tokens": 4,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "return_dict_in_generate": True,
    "output_logits": True,
}
# Not all blocks are kept in either tier, so that each is read and decoded again.
ROUTED, KEPT = {"ahead_share": 1.0}, {"ahead_share": 0.0, "in_round": 2, "cached": 5}
SMALL = {"host_slots": 2, "device_slots": 2, "prefetch": 1, "seats": 3}


def generated(
    directory: Path, dtype: str, device: str | None = None, experts: dict[str, Any] | None = None
) -> tuple[Generated, GenerationPlan]:
    """Generate, and return the plan; with `experts` these come by themselves."""
    options: dict[str, Any] = {"compute_dtype": dtype, "narrow_products": False}
    with Generator.open(directory, Budget(host="4GiB", device=device), **options) as generator:
        plan = with_whole_blocks(generator, generator.plan_only(2, 9, 4))
        generator.use(replace(plan, **SMALL) if experts is None else with_banks(generator, plan, **experts))
        (done,) = generator.run([SeatRows(0, ROWS, 1, generator.model.settings(9, None, SETTINGS))])
        return done, plan


def check_against_stock(
    coded: Path, plain: Path, dtype: str, device: str | None = None, apart: Sequence[dict[str, Any]] = ()
) -> None:
    """Compare with stock `generate` on the decoded directory: whole blocks, and ways of experts by themselves in `apart`."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=getattr(torch, dtype), experts_implementation="eager").eval()
    for parameter in model.parameters():  # loaded, they lie as in the file: at borders that change float32 sums
        parameter.data = parameter.data.clone()
    ids = torch.tensor(ROWS)
    with nullcontext() if CpuMachine().multiplies(dtype) else WideProducts():  # products as here
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS)
    done, plan = generated(coded, dtype, device)
    found = [done, *(generated(coded, dtype, device, each)[0] for each in apart)]
    for each in found:
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
    _, dense = generated(plain, dtype)
    blocks = range(1, plan.num_blocks + 1)
    assert sum(map(plan.stored_bytes, blocks)) < sum(map(dense.stored_bytes, blocks)), "fewer bytes are read"
    assert cached_bytes(plan) < cached_bytes(dense), "and kept, beside the slots that are decoded into"
    assert plan.results.peak_bytes["device" if device else "host"]["decoding"] > 0
    assert any("coded" in note for note in plan.results.notes)


def cached_bytes(plan: GenerationPlan) -> int:
    """Return what weights take in host memory where 16 such blocks are kept there as read, and two of them are made."""
    first, block, *_, last = plan.units
    plan = replace(plan, units=(first, *[block] * 16, last), num_blocks=16, host_slots=16, device_slots=2)
    return sum(group.total_bytes for group in generation_buffers(plan).values() if group.tier == "host")


@pytest.mark.parametrize(("dtype", "device"), sampled([("float32", None), ("bfloat16", None), ("float32", "64MiB")]))
def test_int4(dtype: str, device: str | None, dense_int4: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, what a block is decoded from comes in as many pages as there may be seats."""
    monkeypatch.setattr("headrace.plan.value.placement.LEAST_PAGE_BYTES", PAGE_BYTES)
    coded = dense_int4[0] / "out"
    check_against_stock(coded, decompress_model(coded, tmp_path / "plain"), dtype, device)


@pytest.mark.wide
def test_experts_int4(mixture_int4: Any, tmp_path: Path) -> None:
    coded = mixture_int4[0] / "out"
    check_against_stock(coded, decompress_model(coded, tmp_path / "plain"), "float32", apart=[KEPT])


@pytest.mark.wide
@pytest.mark.parametrize("device", sampled([None, "64MiB"], [None]))
def test_experts_ternary(device: str | None, mixture: Path, tmp_path: Path) -> None:
    run(mixture, tmp_path, to="ternary", experts_only=True)
    coded = tmp_path / "out"
    check_against_stock(coded, decompress_model(coded, tmp_path / "plain"), "float32", device, apart=[ROUTED, KEPT])


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(tuple(KINDS), ("fp8 experts", "nf4")))
def test_published_codes(kind: str, tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, kind)
    apart = [ROUTED] if kind in ("fp8 experts", "mxfp4") else []
    check_against_stock(coded, decompress_model(coded, tmp_path / "plain"), "float32", apart=apart)


@pytest.mark.wide
def test_a_job_goes_on(dense_int4: Any, tmp_path: Path) -> None:
    coded, job = dense_int4[0] / "out", {"prompts": 4, "max_new_tokens": 3}
    with pytest.raises(KeyboardInterrupt):
        answered(coded, tmp_path / "job", 2, **job)
    assert not (tmp_path / "job" / "out.jsonl").exists()
    assert answered(coded, tmp_path / "job", **job) == answered(coded, tmp_path / "whole", **job)


@pytest.mark.wide
@pytest.mark.parametrize("model", sampled(("dense_int4", "mixture_int4"), ("mixture_int4",)))
def test_a_plan_is_that_of_the_run(model: str, request: pytest.FixtureRequest, capfd: Any) -> None:
    """Of the files' headers alone; and beside it what plain weights would take."""
    coded = request.getfixturevalue(model)[0] / "out"
    options, how = GenerateOptions.of({"host_memory": "4GiB"}), {"prompts": 3, "prompt_length": 9, "new_tokens": 4}
    plan = plan_generation(str(coded), options, None, here=True, **how)
    with open_generator(coded, options, None) as generator:
        own = generator.plan_only(3, 9, 4)
    # Before it is compressed as much is known of it, but for a group's width, which follows from a matrix's.
    asked = {**how, "here": True, "compress": "int4"}
    before = plan_generation(str(request.getfixturevalue(model.removesuffix("_int4"))), options, None, **asked)
    assert [unit.decodes for unit in before.units] == [unit.decodes for unit in plan.units]
    assert before.stored_bytes(1) == pytest.approx(plan.stored_bytes(1), rel=0.2)
    for name in ("units", "experts", "host_slots", "device_slots", "rows", "seats", "forecast"):
        assert getattr(plan, name) == getattr(own, name), name
    assert plan.results.notes == own.results.notes
    assert plan.uncoded is not None
    assert own.uncoded is None, "nobody asked"
    called("plan", coded, "--generate", "--prompt-length", 9, "--new-tokens", 4, "--batch", 3, "--machine", "a6000-1ssd")
    said = capfd.readouterr().out
    assert "codes    pack: " in said
    assert "decoded on the device, after they have crossed the link" in said
    assert "plain bfloat16, which would take" in said
    called("plan", coded, "--generate", "--prompt-length", 9, "--new-tokens", 4, "--json")
    assert json.loads(capfd.readouterr().out)["uncoded"]["tokens_per_second"] > 0


def test_what_is_coded_is_not_planned_to_be_compressed(dense_int4: Any, tmp_path: Path) -> None:
    coded, how = dense_int4[0] / "out", {"prompts": 1, "prompt_length": 9, "new_tokens": 4}
    (tmp_path / "config.json").write_bytes((coded / "config.json").read_bytes())
    with pytest.raises(ConfigError, match="is coded already"):
        plan_generation(str(coded), GenerateOptions(), None, here=True, **how, compress="int4")
    alone = plan_generation(str(tmp_path / "config.json"), GenerateOptions(), None, here=True, **how)
    assert alone.units[1].decodes, "config.json says that its files are coded"


def called(*words: object) -> None:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    assert not left.value.code


@pytest.mark.deep
def test_an_adapter_trained_upon_codes_answers_beside_them(dense_int4: Any, tmp_path: Path, capfd: Any) -> None:
    """QLoRA by the command, from its data to its answers and its held-out loss: as merged into the decoded weights."""
    coded, data, run = dense_int4[0] / "out", write_data(tmp_path / "a.jsonl"), tmp_path / "run"
    small = ("--host-memory", "4GiB", "--compute-dtype", "float32")
    sizes = ("--sequence-length", 32, "--tokens-per-step", 64, "--max-steps", 4, "--no-measure")
    called("train", coded, data, "--output", run, "--adapter", "lora:rank=4", "--learning-rate", "3e-2", *sizes, *small)
    merge_adapters(decompress_model(coded, tmp_path / "plain"), run / "final", tmp_path / "merged", {})
    capfd.readouterr()
    answer = ("--prompt", "9 is what 3", "--max-new-tokens", 8, "--temperature", 0, "--raw", *small)
    texts = []
    for words in ((coded, "--adapter", run / "final"), (run,), (tmp_path / "merged",), (coded,)):
        called("generate", *words, *answer)
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] == texts[2] != texts[3]
    losses = []
    for place in (run, tmp_path / "merged", coded):
        called("eval", place, "--data", data, "--sequence-length", 32, "--json", *small)
        losses.append(json.loads(capfd.readouterr().out)["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] < losses[2] - 0.01


def test_held_out_loss_is_that_of_the_decoded_directory(dense_int4: Any, tmp_path: Path) -> None:
    coded = dense_int4[0] / "out"
    (tmp_path / "a.jsonl").write_text('{"text": "water and turbine"}\n{"text": "a river"}\n', encoding="utf-8")
    losses = []
    for place in (coded, decompress_model(coded, tmp_path / "plain")):
        given = {"data": [str(tmp_path / "a.jsonl")], "cache": tmp_path, "host_memory": "4GiB", "sequence_length": 32}
        losses.append(evaluate_model(place, EvalOptions.of({**given, "compute_dtype": "float32"})).loss)
    assert losses[0] == losses[1]


@pytest.mark.wide
def test_what_a_coded_directory_has_besides_is_named(dense_int4: Any, tmp_path: Path, capfd: Any) -> None:
    """By the plans of both kinds, and by the note of what compressed a model with such tensors."""
    assert json.loads((dense_int4[0] / "out" / "compression.json").read_text())["unused_tensors"] == []
    coded = tmp_path / "coded"
    shutil.copytree(dense_int4[0] / "out", coded)
    names = add_unused(coded, 5)
    for more in (("--generate",), ("--adapter", "lora:rank=4", "--max-steps", 1)):
        called("plan", coded, *more, "--machine", "a6000-1ssd", "--json")
        assert json.loads(capfd.readouterr().out)["unused_tensors"] == names
