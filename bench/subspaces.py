"""How many bytes do subspaces (`--gradient lsp`) write at each step, beside whole gradients, and is that what is planned?

    python bench/subspaces.py --scratch DISK [--hidden 512] [--layers 6] [--period 12] [--out subspaces.json]
    python bench/subspaces.py --scratch DISK --model MODEL --host-memory 2.5GiB --period 4 [--ways refit,step]

A random Llama of such a shape, whose embedding and head are a tenth of it (or a model that is given), is trained with AdamW:
whole gradients, then a quarter of the side with `rewrite=refit` and with `rewrite=step`. Each run commits every step. Bytes are
`write_bytes` of /proc/self/io over `--period` steps, in which each block has its turn to be looked at, after two steps that
begin the run (the first fits projectors); merges are among them. Seconds and the peak stand beside them. Planned are, by
numbers of elements, 12 bytes a parameter; 12 of the subspaces and of what is trained whole; and 4 of the matrices besides, with
8 of the subspaces.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.terms.layout import UnitLayout

ROWS, LENGTH, FIRST = 4, 32, 2
WAYS = ("dense", "refit", "step")


def made_model(directory: Path, hidden: int, layers: int) -> None:
    """Write a model of random weights."""
    inner = hidden * 11 // 4 // 32 * 32
    matrices = layers * (4 * hidden * hidden + 3 * hidden * inner)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        vocab_size=max(256, round(matrices * 0.107 / (2 * hidden))),
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(directory)
    torch.set_default_dtype(torch.float32)


def written_bytes() -> int:
    """Return what this process has had written."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())
    return int(fields["write_bytes"])


def planned_bytes(way: str, layouts: list[tuple[UnitLayout, UnitLayout]]) -> int:
    """Return the bytes that a step is planned to write, of units and what is trained of each."""
    matrices = core = plain = 0
    for layout, trained in layouts:
        own = {spec.name: spec.num_elements for spec in trained.parameters}
        for spec in layout.parameters:
            if own[spec.name] < spec.num_elements:
                matrices, core = matrices + spec.num_elements, core + own[spec.name]
            else:
                plain += spec.num_elements
    return {"dense": 12 * (matrices + plain), "refit": 12 * (core + plain)}.get(way, 4 * matrices + 8 * core + 12 * plain)


def measured(model: Path, scratch: Path, way: str, dimension: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return what one way writes and takes a step."""
    period = given.period
    lsp = f"lsp:dimension={dimension},check={period},alpha=0,rewrite={way}"
    options = headrace.Options(
        output=scratch / way,
        gradient="dense" if way == "dense" else lsp,
        host_memory=given.host_memory,
        max_grad_norm=given.max_grad_norm,
        tokens_per_step=ROWS * LENGTH,
        sequence_length=LENGTH,
        learning_rate=1e-4,
    )
    tried, peak = 0, 0

    def batch(seed: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(2, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
        return {"input_ids": ids, "labels": ids}

    def split(plan: Plan) -> Plan:
        """Micro-batches of a row each: projectors are tried on one that they have not seen."""
        batch = replace(plan.batch, micro_batch_sequences=1, num_micro_batches=ROWS)
        return replace(plan, batch=batch).with_gradients(accumulate=True)

    with Engine.open(model, options, adjust_plan=split) as engine:
        for seed in range(FIRST):
            engine.step(batch(seed))
        engine.flush()
        before, begun = written_bytes(), time.perf_counter()
        for seed in range(FIRST, FIRST + period):
            found = engine.step(batch(seed))
            tried += sum(after is not None for _, after in found.estimation_errors.values())
            peak = max(peak, found.peak_bytes["host"])
        engine.flush()
        seconds, written = (time.perf_counter() - begun) / period, (written_bytes() - before) / period
        forms = [(form.layout, form.trained) for form in engine._subject.forms if form.trained is not None]
    planned = planned_bytes(way, forms)
    return {
        "way": way,
        "written_bytes": written,
        "planned_bytes": planned,
        "seconds": seconds,
        "peak_bytes": peak,
        "tried": tried,
    }


def main() -> None:
    """Run all three and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--hidden", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=6)
    arguments.add_argument("--period", type=int, default=12)
    arguments.add_argument("--model", type=Path, help="a model to train in place of a random one of that shape")
    arguments.add_argument("--host-memory", default="4GiB")
    arguments.add_argument("--max-grad-norm", type=float, default=1.0, help="0 for none: then no gradient waits on a drive")
    arguments.add_argument("--ways", default=",".join(WAYS), help="which of them, in order")
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    found = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        scratch = Path(folder)
        model = options.model or scratch / "model"
        if options.model is None:
            made_model(model, options.hidden, options.layers)
        hidden = json.loads((model / "config.json").read_text(encoding="utf-8"))["hidden_size"]
        for way in options.ways.split(","):
            found.append(measured(model, scratch, way, hidden // 4, options))
            shutil.rmtree(scratch / way)
            row = found[-1]
            share = row["written_bytes"] / found[0]["written_bytes"]
            print(
                f"{way:6} {row['written_bytes'] / 1e6:8.2f} MB a step, {share:.3f} of {found[0]['way']}, "
                f"{row['written_bytes'] / row['planned_bytes']:.3f} of planned; {row['seconds']:.2f} s, "
                f"peak {row['peak_bytes'] / 2**30:.2f} GiB; {row['tried']} new projectors tried",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
