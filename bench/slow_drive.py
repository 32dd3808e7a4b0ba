"""Answers of one row from a drive that is held to 0.5 GB/s: plain bfloat16, and the codes that are written.

    python bench/slow_drive.py --scratch DISK [--rate 0.5] [--blocks 8] [--tokens 12] [--rounds 2] [--codes int4,bf16x12]
                               [--out slow.json]

A Llama of 2048 x 5504 (blocks of 50.6 million parameters, all with one block's weights), written under each code. Three blocks
have room in memory, so two stay. Codes that lose anything are rounded plainly: only sizes and speed are of interest here.
Contestants run in turn; seconds of a pass are the median of each run, and its least beside it, for other jobs are only ever in
the way; `cpu` is what a pass takes of all cores. `planned` is what the planner forecasts for these very slots, with a drive of
that rate and otherwise a nominal machine.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from headrace.codec import nearest
from headrace.codec.table import CODES, written_codes
from headrace.codec.targets import is_dictionary_table
from headrace.compress.recoding import recode
from headrace.files import extents
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.generate.plan.seconds import with_forecast
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.value.decoding import making_like
from headrace.terms.events import GenerationPass
from headrace.terms.options.budget import Budget
from headrace.terms.options.compress_options import CompressOptions
from headrace.testing import ThrottledFile

PLAIN = "bfloat16"
_FIRST = "model.layers.0."


def write_models(folder: Path, blocks: int, codes: Sequence[str]) -> None:
    """Write the model plainly, and under each code."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=False, dtype="bfloat16")
    torch.manual_seed(0)
    block = LlamaForCausalLM(config).to(torch.bfloat16).state_dict()
    config.num_hidden_layers = blocks
    for name in (PLAIN, *codes):
        code = CODES.get(name)
        if code is not None and code.direct is not None:
            in_one_file(recode(CompressOptions.of({"model": folder / PLAIN, "output": folder / name, "to": name})).output)
            continue
        target = code.target(128) if code is not None and code.target is not None else None
        stored: dict[str, torch.Tensor] = {}
        for key, weight in block.items():
            if target is None or not key.startswith(_FIRST) or weight.dim() < 2:
                stored[key] = weight
                continue
            rounded = nearest(weight.float()[None], target.grid(weight.shape[1], weight.dtype))
            parts = target.parts(rounded.codes[0], rounded.sides[0], weight.dtype)
            stem = key.removesuffix("weight")
            stored |= {f"{each}.0" if is_dictionary_table(each) else stem + each: part for each, part in parts.items()}
        whole = {key: tensor for key, tensor in stored.items() if not key.startswith(_FIRST)}
        for number in range(blocks):
            own = {key: tensor for key, tensor in stored.items() if key.startswith(_FIRST)}
            whole |= {key.replace(".0.", f".{number}.", 1): tensor.clone() for key, tensor in own.items()}
        directory = folder / name
        config.save_pretrained(directory)
        save_file(whole, directory / "model.safetensors", {"format": "pt"})
        if target is not None:
            modules = {
                key.removesuffix(".weight"): 128 for key, weight in block.items() if "layers" in key and weight.dim() > 1
            }
            described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
            described["quantization_config"] = target.describe(modules, ["lm_head"])
            (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")


def in_one_file(model: Path) -> None:
    """Join the files of a model: a slow drive is a slow file here, and several would be several drives."""
    files = sorted(model.glob("*.safetensors"))
    tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
    for file in (*files, model / "model.safetensors.index.json"):
        file.unlink()
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


def passes_of(directory: Path, tokens: int, rate: float) -> dict[str, Any]:
    """Generate; return the seconds of passes after the first two, bytes read, and what was planned."""
    seen: list[GenerationPass] = []
    cpu: list[float] = []

    def sink(event: Any) -> None:
        if isinstance(event, GenerationPass):
            seen.append(event)
            cpu.append(time.process_time())

    with Generator.open(directory, Budget(host="6GiB"), sink=sink) as generator:
        plan = replace(generator.plan_only(1, 8, tokens), host_slots=3, device_slots=3, prefetch=2)
        machine = nominal_machine(plan.compute_threads, host_bytes=1 << 34, device_bytes=None)
        drive = replace(machine.drives[0], read_bytes_per_second=rate, mixed_bytes_per_second=rate)
        units = tuple(replace(unit, making_like=making_like(unit.decodes, machine)) for unit in plan.units)
        planned = with_forecast(replace(plan, units=units), replace(machine, drives=(drive,))).forecast
        assert planned is not None
        generator.use(plan)
        asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        list(generator.run([SeatRows(0, (tuple(range(10, 18)),), 0, generator.model.settings(8, None, asked))]))
    steady = seen[2:]
    return {
        "median": statistics.median(each.seconds for each in steady),
        "least": min(each.seconds for each in steady),
        "read_bytes": statistics.median(each.bytes_read for each in steady),
        "planned": planned.pass_seconds,
        "cpu": statistics.median(after - before for before, after in pairwise(cpu[1:])),
    }


def slow(rate: float) -> Callable[[Path], Any]:
    """Return what opens a file as a drive of `rate` bytes a second would give it."""
    plain = extents.SourceFile
    return lambda path: ThrottledFile(plain(path), read_bytes_per_second=rate, write_bytes_per_second=rate)


def main() -> None:
    """Print a table, and write it as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--rate", type=float, default=0.5, help="GB/s")
    arguments.add_argument("--blocks", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=12)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--codes", default=",".join(code.name for code in written_codes()))
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    headrace.set_process_defaults()
    folder = given.scratch / "headrace-slow-drive"
    folder.mkdir()
    codes = given.codes.split(",")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in (PLAIN, *codes)}
    try:
        write_models(folder, given.blocks, codes)
        extents.SourceFile = slow(given.rate * 1e9)  # type: ignore[assignment, misc]
        for _ in range(given.rounds):
            for name in found:
                found[name].append(passes_of(folder / name, given.tokens, given.rate * 1e9))
                print(name, json.dumps(found[name][-1]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name in codes:
        for key in ("median", "least", "read_bytes", "planned", "cpu"):
            ratios = [one[key] / other[key] for one, other in zip(found[PLAIN], found[name], strict=True)]
            print(f"{name} {key}: bfloat16 over it {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    if given.out:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
