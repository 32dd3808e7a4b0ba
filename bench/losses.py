"""What loss does each way to train reach after equal tokens, in what time, and with what state?

    python bench/losses.py --scratch DIR --output OUT.svg [--model SMOLLM2] [--steps 150] [--peers FOLDER]

A Llama of bytes with 3.3 million parameters is trained here on the docstrings of torch, then tuned on the Python library's
source, 4 rows of 128 a step. Of each way three rates are tried with one seed, and two more seeds run with the best;
projectors that are not fitted in closed form have the rate of those that are. `--model` is SmolLM2-135M-Instruct as `make
demo` keeps it: it is tuned on what the library says of itself, 4 rows of 128 a step, one seed, with one rate for each way.
All is float32, clipped to a norm of 1, with cosine rates after 10 steps of warm-up. Every way but one runs in
Headrace's engine; GaLore is galore-torch in plain PyTorch, where `--peers` names a folder that it and bitsandbytes,
which it imports, are installed in. Each run is a process of its own and adds a line to `DIR/losses.jsonl`; the same
command goes on after an interruption, and draws what there is.
"""

import argparse
import ast
import importlib.util
import json
import math
import os
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.machine.meter import MemoryMeter
from headrace.plan.value.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
Run = dict[str, Any]
LENGTH, WARM_UP, SEEDS, CHECK = 128, 10, 3, 50
SMALL, REAL = "3.5 M", "SmolLM2-135M"
ROWS = {SMALL: 4, REAL: 4}
HOST = {SMALL: "600MiB", REAL: "1792MiB"}
BYTES = 128
PRETRAINED_STEPS, PRETRAINED_RATE = 400, 2e-3


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train: its options, the rates that are tried on the small model, and the one for the real model."""

    options: dict[str, Any]
    rates: tuple[float, ...]
    real_rate: float
    whole: bool = False
    seeds: int = SEEDS


LSP = f"lsp:nonzeros=8,check={CHECK}"
WAYS: dict[str, Way] = {
    "AdamW, everything": Way(options={}, rates=(5e-4, 1e-3, 2e-3), real_rate=2e-4, whole=True),
    "AdamW": Way(options={}, rates=(5e-4, 1e-3, 2e-3), real_rate=2e-4),
    "LSP, block": Way(options={"gradient": LSP}, rates=(2e-3, 4e-3, 8e-3), real_rate=1e-3),
    "LoRA": Way(options={"adapter": "lora"}, rates=(2e-3, 4e-3, 8e-3), real_rate=2e-3),
    "GaLore (peer)": Way(options={}, rates=(2e-3, 4e-3, 8e-3), real_rate=1e-3),
    "LOMO": Way(options={"optimizer": "lomo"}, rates=(0.1, 0.3, 1.0), real_rate=0.1),
    "AdaLomo": Way(options={"optimizer": "adalomo"}, rates=(2e-3, 5e-3, 1e-2), real_rate=2e-3),
    "LSP, random": Way(options={"gradient": f"{LSP},projector=random"}, rates=(), real_rate=1e-3),
    "LSP, learned": Way(options={"gradient": f"{LSP},projector=learned"}, rates=(), real_rate=1e-3),
}
GALORE = "GaLore (peer)"
TUNED_AS = "LSP, block"  # whose rate those have that are not tuned themselves
# Half of the blocks' side, and the ranks whose trained numbers are about as many, or LoRA's usual one.
DIMENSION = {SMALL: 128, REAL: 256}
RANK = {SMALL: 24, REAL: 16}
GALORE_RANK = {SMALL: 40, REAL: 128}


def options_of(size: str, way: str, rate: float, seed: int, steps: int) -> headrace.Options:
    """Return what a run of Headrace is asked for."""
    own = dict(WAYS[way].options)
    if "gradient" in own:
        own["gradient"] += f",dimension={DIMENSION[size]}"
    if "adapter" in own:
        own["adapter"] += f":rank={RANK[size]},alpha={2 * RANK[size]}"
    elif not WAYS[way].whole:
        own["train"] = "matrices"
    return headrace.Options(
        host_memory=HOST[size],
        compute_dtype="float32",
        tokens_per_step=ROWS[size] * LENGTH,
        sequence_length=LENGTH,
        learning_rate=rate,
        lr_schedule="cosine",
        warmup_steps=WARM_UP,
        max_steps=steps,
        seed=seed,
        **own,
    )


# -- models and text --------------------------------------------------------------------------------------------------


def bytes_of(texts: Iterator[str], limit: int) -> torch.Tensor:
    """Return the first `limit` bytes of `texts`, what is not ASCII as 127."""
    found = bytearray()
    for text in texts:
        found += text.encode()
        if len(found) > limit:
            break
    return torch.frombuffer(found[:limit], dtype=torch.uint8).long().clamp(max=BYTES - 1)


def docstrings() -> Iterator[str]:
    """Yield what torch says of itself."""
    folder = Path(sysconfig.get_paths()["purelib"])
    for path in sorted((folder / "torch").glob("[a-n_]*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield f"{text}\n\n"


def library() -> Iterator[str]:
    """Yield the Python library's source, in an order that mixes its files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.glob("*.py"))
    for number in torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist():
        yield paths[number].read_text(encoding="utf-8", errors="ignore")


def make_small(folder: Path) -> None:
    """Train the small model on docstrings, and write it and the text that it will be tuned on."""
    import random

    texts = list(docstrings())
    random.Random(0).shuffle(texts)
    known, new = bytes_of(iter(texts), 4_000_000), bytes_of(library(), 4_000_000)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=BYTES,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINED_RATE, betas=(0.9, 0.95))
    generator, length = torch.Generator().manual_seed(1), LENGTH
    for step in range(PRETRAINED_STEPS):
        cosine = 0.525 + 0.475 * math.cos(math.pi * step / PRETRAINED_STEPS)
        optimizer.param_groups[0]["lr"] = PRETRAINED_RATE * min(1.0, (step + 1) / 30) * cosine
        starts = torch.randint(len(known) - length, (8,), generator=generator)
        rows = torch.stack([known[start : start + length] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"pre-training, step {step}: {float(loss.detach()):.3f}", flush=True)
    cut = len(new) * 95 // 100
    held_out = new[cut : cut + 64 * LENGTH * ((len(new) - cut) // (64 * LENGTH))].view(-1, LENGTH)
    held_out = held_out[:: len(held_out) // 64][:64]
    torch.save({"train": new[:cut], "held out": held_out}, folder / "text.pt")
    model.save_pretrained(folder / "model")


def make_real(folder: Path, model: Path) -> None:
    """Write the text that the real model is tuned on: questions and answers of what the Python library says of itself."""
    sys.path.append(str(ROOT / "demo"))
    from python_docs import python_docs

    tokenizer = AutoTokenizer.from_pretrained(model)
    parts = []
    for samples in python_docs():
        ids: list[int] = []
        for sample in samples:
            ids += tokenizer.apply_chat_template(sample.messages, tokenize=True, return_dict=False)
        parts.append(torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH))
    torch.save({"train": parts[0], "held out": parts[1][:40]}, folder / "text.pt")
    (folder / "model").symlink_to(model)


def batches(size: str, text: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    """Yield the rows of one step after another."""
    generator, rows = torch.Generator().manual_seed(100 + seed), ROWS[size]
    if size == REAL:
        while True:
            order = torch.randperm(len(text), generator=generator)
            yield from (text[some] for some in order[: len(order) // rows * rows].split(rows))
    while True:
        starts = torch.randint(len(text) - LENGTH, (rows,), generator=generator)
        yield torch.stack([text[start : start + LENGTH] for start in starts])


# -- one run ----------------------------------------------------------------------------------------------------------


def one(run: Run, scratch: Path) -> Run:
    """Train one way with one rate and seed, and return the row."""
    size, way, steps = run["size"], run["way"], run["steps"]
    text = torch.load(scratch / folder_of(size) / "text.pt")
    model = scratch / folder_of(size) / "model"
    train = galore if way == GALORE else with_headrace
    rows = batches(size, text["train"], run["seed"])
    looks = sorted({*range(steps // 3, steps + 1, steps // 3), steps})
    return run | train(run, model, rows, text["held out"].split(ROWS[size]), looks, scratch)


def with_headrace(
    run: Run, model: Path, rows: Iterator[torch.Tensor], held_out: tuple[torch.Tensor, ...], looks: list[int], scratch: Path
) -> Run:
    """Train in Headrace's engine."""
    size = run["size"]

    def split(plan: Plan) -> Plan:
        """Micro-batches of half of a step: what is held out at a look at projectors is one of them."""
        half = ROWS[size] // 2
        batch = replace(plan.batch, micro_batch_sequences=half, num_micro_batches=2)
        return replace(plan, batch=batch).with_gradients(accumulate=True)

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        options = options_of(size, run["way"], run["rate"], run["seed"], run["steps"])
        options = replace(options, output=Path(folder) / "run")
        with Engine.open(model, options, adjust_plan=split) as engine:

            def step(ids: torch.Tensor) -> tuple[float, int, int]:
                found = engine.step({"input_ids": ids, "labels": ids})
                return found.loss, sum(found.bytes_written.values()), found.peak_bytes["host"]

            def loss() -> float:
                values = [engine.evaluate({"input_ids": ids, "labels": ids}).loss for ids in held_out]
                return statistics.fmean(values)

            found = followed(step, loss, rows, looks)
            assert engine.plan is not None
            trained = sum(
                spec.num_elements
                for form in engine._subject.forms
                if form.trained is not None
                for spec in form.trained.parameters
                if spec.name not in form.left
            )
            return found | {"planned": engine.plan.peak("host"), "trained": trained}


def galore(
    run: Run, model: Path, rows: Iterator[torch.Tensor], held_out: tuple[torch.Tensor, ...], looks: list[int], scratch: Path
) -> Run:
    """Train in plain PyTorch with galore-torch, under the same schedule and clipping."""
    from galore_torch import GaLoreAdamW

    size = run["size"]
    options = options_of(size, "AdamW", run["rate"], run["seed"], run["steps"])
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    matrices = []
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(".layers." in name and parameter.dim() == 2)
        matrices += [parameter] if parameter.requires_grad else []
    group = {"params": matrices, "rank": GALORE_RANK[size], "update_proj_gap": CHECK, "scale": 1.0, "proj_type": "std"}
    optimizer = GaLoreAdamW([group], lr=run["rate"], betas=(0.9, 0.95), eps=1e-8, no_deprecation_warning=True)
    count, meter = iter(range(run["steps"])), MemoryMeter()

    def step(ids: torch.Tensor) -> tuple[float, int, int]:
        optimizer.param_groups[0]["lr"] = run["rate"] * options.schedule.factor(next(count))
        loss = whole(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(matrices, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), 0, meter.peak_bytes()

    @torch.no_grad()
    def loss() -> float:
        return statistics.fmean(float(whole(input_ids=ids, labels=ids).loss) for ids in held_out)

    found = followed(step, loss, rows, looks)
    trained = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return found | {"trained": trained}


def followed(
    step: Callable[[torch.Tensor], tuple[float, int, int]],
    loss: Callable[[], float],
    rows: Iterator[torch.Tensor],
    looks: list[int],
) -> Run:
    """Take steps, and look at held-out loss after those of `looks`; its time is not counted."""
    curve, seconds, written, peak, train = [], [], 0, 0, []
    before = time.process_time()
    for number in range(1, looks[-1] + 1):
        ids, begun = next(rows), time.perf_counter()
        now, wrote, high = step(ids)
        seconds.append(time.perf_counter() - begun)
        written, peak = written + wrote, max(peak, high)
        train.append(now)
        if number in looks:
            curve.append((number, sum(seconds), loss()))
    return {
        "curve": curve,
        "loss": curve[-1][2],
        "train": statistics.fmean(train[-10:]),
        "seconds": statistics.median(seconds),
        "all_seconds": sum(seconds),
        "cpu_seconds": time.process_time() - before,
        "written": written // len(seconds),
        "peak": peak,
    }


def in_child(run: Run, scratch: Path) -> Run:
    """Return the row of a run in a process of its own, which begins with what is imported here."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w", encoding="utf-8") as file:
                json.dump(one(run, scratch), file)
            code = 0
        except BaseException:
            traceback.print_exc()  # what ends a child is said, though it leaves without Python's own end
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        said = file.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"a run ended early: {run}")
    return json.loads(said)


# -- all runs ---------------------------------------------------------------------------------------------------------


def folder_of(size: str) -> str:
    return {SMALL: "small", REAL: "real"}[size]


class Results:
    """What has been run, a line of JSON each."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self._path, self._scratch = path, scratch
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.rows: list[Run] = [json.loads(line) for line in lines]

    def of(self, **wanted: Any) -> list[Run]:
        """Return the rows that have these values."""
        return [row for row in self.rows if all(row[key] == value for key, value in wanted.items())]

    def run(self, **wanted: Any) -> Run:
        """Return the row of one run, which is run now unless it was."""
        found = self.of(**wanted)
        if not found:
            row = in_child(wanted, self._scratch)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.rows.append(row)
            found = [row]
            print(
                f"{row['size']} {row['way']} {row['rate']:g} seed {row['seed']}: {row['loss']:.4f}, "
                f"{row['seconds']:.2f} s a step",
                flush=True,
            )
        return found[0]

    def best_rate(self, size: str, way: str, steps: int) -> float:
        """Return the rate of the run with the least held-out loss, of those that ran with the first seed."""
        return float(min(self.of(size=size, way=way, seed=0, steps=steps), key=lambda row: row["loss"])["rate"])


def tune_small(results: Results, steps: int) -> None:
    """Try three rates of each way with one seed, one more where the best is at an end, and run the best with other seeds."""
    present = {name: way for name, way in WAYS.items() if name != GALORE or has_galore()}
    own = {name: way.rates for name, way in present.items() if way.rates}
    for place in (1, 0, 2):
        for name, rates in own.items():
            results.run(size=SMALL, way=name, rate=rates[place], seed=0, steps=steps)
    for name, rates in own.items():
        best = results.best_rate(SMALL, name, steps)
        if best in (rates[0], rates[-1]):
            beyond = best**2 / rates[1]
            results.run(size=SMALL, way=name, rate=float(f"{beyond:.2g}"), seed=0, steps=steps)
    for seed in range(SEEDS):
        for name, way in present.items():
            if seed < way.seeds:
                rate = results.best_rate(SMALL, name if name in own else TUNED_AS, steps)
                results.run(size=SMALL, way=name, rate=rate, seed=seed, steps=steps)


def has_galore() -> bool:
    return importlib.util.find_spec("galore_torch") is not None


def best_rows(results: Results, steps: int) -> dict[tuple[str, str], list[Run]]:
    """Return the runs of each size and way with its best rate, by seed."""
    found = {}
    for size in (SMALL, REAL):
        for way in WAYS:
            if results.of(size=size, way=way, seed=0, steps=steps):
                rate = results.best_rate(size, way, steps)
                found[size, way] = sorted(results.of(size=size, way=way, rate=rate, steps=steps), key=lambda row: row["seed"])
    return found


def table_of(found: dict[tuple[str, str], list[Run]]) -> str:
    """Return the Markdown table: means over seeds, and half of what lies between the largest and the least."""
    lines = [
        "| model | way | rate | held-out loss | seeds | trained | written a step | peak, planned | peak | CPU s a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (size, way), rows in found.items():
        losses = [row["loss"] for row in rows]
        planned = f"{rows[0]['planned'] >> 20} MiB" if rows[0].get("planned") else ""
        written = f"{rows[0]['written'] / 1e6:.1f} MB" if rows[0]["written"] else ""
        peak = max(row["peak"] for row in rows) >> 20
        seconds = statistics.median(row["cpu_seconds"] / row["steps"] for row in rows)
        lines.append(
            f"| {size} | {way} | {rows[0]['rate']:g} | {statistics.fmean(losses):.4f} ± {(max(losses) - min(losses)) / 2:.4f} "
            f"| {len(rows)} | {rows[0]['trained'] / 1e6:.2f} M | {written} | {planned} | {peak} MiB | {seconds:.2f} |"
        )
    return "\n".join([*lines, ""])


def draw(found: dict[tuple[str, str], list[Run]], path: Path) -> None:
    """Write the picture: held-out loss over time, and at the end over what is kept of each trained number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(size for size, _ in found))
    figure, axes = pyplot.subplots(len(sizes), 2, figsize=(9, 3.8 * len(sizes)), layout="constrained", squeeze=False)
    for (size, way), rows in found.items():
        left, right = axes[sizes.index(size)]
        first = rows[0]
        curve = first["curve"]
        (line,) = left.plot(
            [first["cpu_seconds"] * point[0] / first["steps"] for point in curve],
            [point[2] for point in curve],
            "o-",
            label=way,
        )
        loss, state = statistics.fmean(row["loss"] for row in rows), state_bytes(way, rows[0]["trained"]) / 1e6
        spread = [[loss - min(row["loss"] for row in rows)], [max(row["loss"] for row in rows) - loss]]
        right.errorbar([state], [loss], spread, fmt="o", color=line.get_color(), capsize=3)
        right.annotate(way, (state, loss), xytext=(5, 4), textcoords="offset points", fontsize=8)
        left.set_title(size)
        left.set_xlabel("CPU seconds, looks at held-out loss included")
        left.set_ylabel("held-out loss")
        right.set_xlabel("masters and states, MB")
        for axis in (left, right):
            axis.grid(alpha=0.3)
        left.legend(fontsize=7)
    figure.savefig(path)


def state_bytes(way: str, trained: int) -> int:
    """Return the bytes of what a run keeps of so many trained numbers: each one in float32, and a rule's states of it."""
    return trained * (4 if WAYS[way].options.get("optimizer") in ("lomo", "adalomo") else 12)


def main() -> None:
    """Run what has not been run, and write the table and the picture."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--output", type=Path, default=Path("losses.svg"))
    arguments.add_argument("--model", type=Path, help="SmolLM2; without it the small model alone is tuned")
    arguments.add_argument("--only", choices=("small", "real"))
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--peers", type=Path, help="a folder that galore-torch and bitsandbytes are installed in")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    for size, make in ((SMALL, make_small), (REAL, lambda folder: make_real(folder, given.model))):
        folder = given.scratch / folder_of(size)
        if given.only == folder_of(REAL if size == SMALL else SMALL) or (size == REAL and not given.model):
            continue
        if not (folder / "text.pt").exists():
            folder.mkdir(parents=True, exist_ok=True)
            make(folder)
    if given.peers:
        sys.path.append(str(given.peers))
    results = Results(given.scratch / "losses.jsonl", given.scratch)
    if given.only != "real":
        tune_small(results, given.steps)
    if given.model and given.only != "small":
        for name, way in WAYS.items():
            if name != GALORE or has_galore():
                results.run(size=REAL, way=name, rate=way.real_rate, seed=0, steps=given.steps)
    found = best_rows(results, given.steps)
    table = table_of(found)
    print(table)
    given.output.with_suffix(".md").write_text(table, encoding="utf-8")
    given.output.with_suffix(".json").write_text(json.dumps(results.rows, indent=1) + "\n", encoding="utf-8")
    draw(found, given.output)


if __name__ == "__main__":
    main()
