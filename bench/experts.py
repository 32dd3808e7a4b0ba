"""Experts of QMoE's largest shape (2080 x 6144): compressed to ternary words, stored, and run one at a time.

    python bench/experts.py --scratch DISK [--experts 16] [--hidden 2080] [--width 6144] [--tokens 8] [--out experts.json]

Makes a mixture of one block in DISK, normal weights as a fresh model has, and compresses it (`headrace compress --to ternary
--experts-only`). Then it generates with it three ways, which must agree to the bit: whole blocks, experts one at a time, and
these with half of them kept in memory; it prints the bytes that each read, and what routing needed.
"""

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

import headrace
from headrace.compress.run import compress_model
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.plan.value.expert_plan import ExpertPlan
from headrace.terms.options.budget import Budget
from headrace.terms.options.compress_options import CompressOptions


def make_model(directory: Path, experts: int, hidden: int, width: int) -> int:
    """Write a mixture of one block, with a tokenizer of bytes; return the parameters of its experts."""
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_local_experts": experts, "num_experts_per_tok": 1}
    heads = {"num_attention_heads": hidden // 104 if hidden % 104 == 0 else 4, "num_hidden_layers": 1, "vocab_size": 320}
    heads["num_key_value_heads"] = heads["num_attention_heads"]
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, max_position_embeddings=512)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return experts * 3 * hidden * width


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of bytes, with at most 300 words, to `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water flows to the turbine"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(str(directory))


def generated(directory: Path, tokens: int, cached: int | None) -> dict[str, Any]:
    """Generate with whole blocks (`cached` None), or with experts one at a time; return tokens and what was read."""
    with Generator.open(directory, Budget(host="20GiB"), compute_dtype="bfloat16") as generator:
        plan = replace(generator.plan_only(1, 8, tokens), units=generator.model.source.figures, experts=None)
        apart = generator.model.source.by_experts
        assert apart is not None
        if cached is not None:
            how = ExpertPlan(figures=apart.expert_figures, choices=1, in_round=1, cached=cached, ahead_share=1.0)
            plan = replace(plan, units=apart.figures, experts=how)
        generator.use(replace(plan, host_slots=1, device_slots=1, prefetch=0))
        asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        settings = generator.model.settings(8, None, asked)
        before, start = generator.model.source.bytes_read, time.perf_counter()
        (done,) = generator.run([SeatRows(0, (tuple(range(10, 18)),), 0, settings)])
        seconds, read = time.perf_counter() - start, generator.model.source.bytes_read - before
        return {
            "tokens": done.tokens,
            "seconds": seconds,
            "read_bytes": read,
            "expert_bytes": apart.expert_figures.stored_bytes,
        }


def main() -> None:
    """Print what was found, and write it as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--experts", type=int, default=16)
    arguments.add_argument("--hidden", type=int, default=2080)
    arguments.add_argument("--width", type=int, default=6144)
    arguments.add_argument("--tokens", type=int, default=8)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    headrace.set_process_defaults()
    folder = given.scratch / "headrace-experts"
    folder.mkdir()
    try:
        weights = make_model(folder / "model", given.experts, given.hidden, given.width)
        lines = (f'{{"text": "{" ".join(f"{i} and {k} is {i + k}, and water flows" for k in range(9))}"}}' for i in range(400))
        (folder / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        values = {"model": folder / "model", "output": folder / "out", "data": str(folder / "a.jsonl"), "to": "ternary"}
        rows = 2 * given.width // 128 + 8  # as many tokens as a matrix has inputs, twice
        sizes = {"sequence_length": 128, "calibration_rows": rows, "held_out_rows": 2, "cache": folder / "cache"}
        start, cpu = time.perf_counter(), time.process_time()
        done = compress_model(CompressOptions.of({**values, **sizes, "experts_only": True, "host_memory": "8GiB"}), say=print)
        coded = done.bytes_after - (done.bytes_before - 2 * weights)
        found: dict[str, Any] = {
            "compress_seconds": time.perf_counter() - start,
            "compress_cpu_seconds": time.process_time() - cpu,
        }
        found |= {"ratio": 2 * weights / coded, "bits": 8 * coded / weights, "parameters": weights}
        found["zeros"] = sum(report.zeros for report in done.reports) / len(done.reports)
        ways = {"whole blocks": None, "one at a time": 0, "half kept": given.experts // 2}
        found |= {name: generated(folder / "out", given.tokens, cached) for name, cached in ways.items()}
        assert len({found[name]["tokens"] for name in ways}) == 1, "all ways give the same tokens"
        print(json.dumps(found, indent=2))
        if given.out:
            given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
