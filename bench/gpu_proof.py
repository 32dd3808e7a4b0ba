"""What holds on a GPU, in ten minutes: kernels beside float64, then runs of real widths, measured over planned.

    python bench/gpu_proof.py --output DIR [--from DIR/results.json] [--dry-run]

Each case is a process with a time of its own, the dearest last. Weights are made on the card, and its memory is capped to
`--cap`, that of a 24 GB card in use. DIR/results.json and DIR/results.md are written after each case; `--from` takes over the
cases that ended well. `--dry-run` runs all of it with tiny widths, on the device double where there is no GPU. Without a GPU it
says so. Exit code 1 if a case failed, 2 if the command was wrong.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from launch import GIB, HERE, environment, machine_facts, measure_machine, require_disk, scratch_directory
from worker import refuse

Row = dict[str, Any]
DISK_BYTES, NEW_TOKENS, STEPS, GROUP = 39 * 10**9, 24, 5, 128
QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 16384, "max_position_embeddings": 4096}
# Widths as published, fewer blocks: 8B, 32B and 30B-A3B of Qwen3. Full training needs 26 bytes a parameter of the drive.
SHAPES: dict[str, tuple[str, Row]] = {
    "8b": (
        "qwen3",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 6, "num_attention_heads": 32},
    ),
    "32b-int4": (
        "qwen3",
        {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 12, "num_attention_heads": 64},
    ),
    "30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
TINY |= {"num_key_value_heads": 2, "vocab_size": 512}
TINY_EXPERTS = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of results.json, results.md and the profile")
    parser.add_argument("--scratch", type=Path, default=None, help="directory on the disk under test; default: --output")
    parser.add_argument("--from", dest="earlier", type=Path, default=None, help="results.json of a run to go on with")
    parser.add_argument("--cap", default="22GiB", help="memory of the card that is used")
    parser.add_argument("--host-memory", default="56GiB", help="host memory that is used")
    parser.add_argument("--seconds", type=float, default=570, help="of all cases; what does not fit is left out")
    parser.add_argument("--dry-run", action="store_true", help="tiny widths; without a GPU on its double")
    for hidden in ("--case", "--work"):
        parser.add_argument(hidden, type=str if hidden == "--case" else Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def kernels(options: argparse.Namespace) -> Row:
    """Run each case of `tests/kernel_cases.py` on the GPU, or by Triton's interpreter."""
    sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]
    import kernel_cases

    device = torch.device("cpu" if options.dry_run else "cuda")
    return {"cases": kernel_cases.run(device)}


def profile(options: argparse.Namespace) -> Row:
    """Measure the machine briefly; the plans of later cases are for it."""
    seconds = 4 if options.dry_run else 40
    return {"profile": measure_machine(options.work, options.output / "machine.json", seconds)}


def measured(options: argparse.Namespace) -> Any:
    """Return the profile of this machine, as the case `machine` left it."""
    from headrace.plan.clock.machine_profiles import load_profile

    if not (options.output / "machine.json").exists():
        refuse("there is no profile of this machine: see the case `machine`")
    return load_profile(options.output / "machine.json")


def training(name: str, **method: Any) -> Callable[[argparse.Namespace], Row]:
    def run(options: argparse.Namespace) -> Row:
        import headrace
        from headrace.plan.forecast.forecast import forecast
        from headrace.plan.value.words import explain_plan

        length = 64 if options.dry_run else 2048
        ceilings = measured(options)
        asked = headrace.Options(
            device_memory="256MiB" if options.dry_run else options.cap,
            host_memory="1GiB" if options.dry_run else options.host_memory,
            output=options.work / "run",
            ssd=[options.work],
            learning_rate=1e-5,
            tokens_per_step=length,
            sequence_length=length,
            machine=ceilings,
            **method,
        )
        drawn = torch.Generator().manual_seed(0)
        rows, seconds = [], []
        with headrace.Engine.open(made(name, options), asked) as engine:
            for _ in range(STEPS):
                tokens = torch.randint(0, 512, (1, length), generator=drawn)
                started = time.perf_counter()
                rows.append(engine.step({"input_ids": tokens, "labels": tokens}))
                seconds.append(time.perf_counter() - started)
            plan = engine.plan
        assert plan is not None
        return {
            "measured_seconds": median(seconds[2:]),
            "planned_seconds": forecast(plan, ceilings).step_seconds,
            "tokens": length,
            "peak_bytes": max(row.peak_bytes.get("device", 0) for row in rows),
            "planned_peak_bytes": plan.peak("device"),
            "losses": [row.loss for row in rows],
            "plan": explain_plan(plan),
        }

    return run


def answering(name: str) -> Callable[[argparse.Namespace], Row]:
    def run(options: argparse.Namespace) -> Row:
        from headrace.generate.passes.generator import Generator
        from headrace.terms.events import GenerationPass

        passes: list[float] = []

        def note(event: Any) -> None:
            if isinstance(event, GenerationPass):
                passes.append(event.seconds)

        memory = {"host_memory": "1GiB", "device_memory": "256MiB"}
        if not options.dry_run:
            memory = {"host_memory": options.host_memory, "device_memory": options.cap}
        ceilings = measured(options)
        settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        prompt = torch.randint(3, 512, (1, 32), generator=torch.Generator().manual_seed(1)).tolist()
        with Generator.open(made(name, options), machine=ceilings, sink=note, **memory) as generator:
            plan = generator.prepare(1, 32, NEW_TOKENS)
            answers = [list(generator.generate(prompt, **settings)) for _ in range(2)]
        assert plan.forecast is not None
        return {
            "measured_seconds": median(passes[len(passes) // 2 + 2 :]),
            "planned_seconds": plan.forecast.pass_seconds,
            "tokens": 1,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            "planned_peak_bytes": plan.peak("device"),
            "repeated": str(answers[0]) == str(answers[1]),
            "plan": plan.explain(),
        }

    return run


# Seconds that each may take, in the order in which they run.
CASES: dict[str, tuple[float, Callable[[argparse.Namespace], Row]]] = {
    "kernels": (60, kernels),
    "machine": (75, profile),
    "answer-32b-int4": (90, answering("32b-int4")),
    "lora-8b": (80, training("8b", adapter="lora")),
    "answer-30b-a3b": (90, answering("30b-a3b")),
    "lora-30b-a3b": (120, training("30b-a3b", adapter="lora")),
    "full-8b": (150, training("8b")),
}


def main() -> None:
    options = options_of()
    if not (options.dry_run or torch.cuda.is_available()):
        print("gpu-proof: no CUDA device here; nothing was measured (--dry-run tries the script)")
        return
    if options.case is not None:
        (options.work / "result.json").write_text(json.dumps(CASES[options.case][1](options)), encoding="utf-8")
        return
    options.output = options.output.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    results = earlier(options.earlier) if options.earlier else {"rows": {}}
    slower = 20 if options.dry_run else 1  # no limit that a test could meet
    until = time.monotonic() + options.seconds * slower
    with scratch_directory(options.scratch or options.output) as scratch:
        if not options.dry_run:
            require_disk(scratch, DISK_BYTES, "the proof")
        results["machine"] = machine_facts(scratch) | {"torch": torch.__version__}
        if torch.cuda.is_available():
            results["machine"]["gpu"] = torch.cuda.get_device_name()
        for name, (limit, _) in CASES.items():
            if results["rows"].get(name, {}).get("status") != "ok":
                left = min(limit * slower, until - time.monotonic())
                results["rows"][name] = run_case(name, options, scratch, left)
            save(results, options.output)
            print(f"{name}: {results['rows'][name]['status']}", flush=True)
    print((options.output / "results.md").read_text(encoding="utf-8"))
    if any(row["status"] == "failed" for row in results["rows"].values()):
        sys.exit(1)


def run_case(name: str, options: argparse.Namespace, scratch: Path, seconds: float) -> Row:
    """Run a case in a process of its own; what it leaves of the run is removed, models stay for later cases."""
    if seconds < 10:
        return {"status": "left out: no time"}
    command = [sys.executable, str(Path(__file__)), "--output", str(options.output), "--case", name, "--work", str(scratch)]
    command += ["--cap", options.cap, "--host-memory", options.host_memory, *(["--dry-run"] if options.dry_run else [])]
    variables = environment(omp_wait_policy="passive")
    if options.dry_run and name == "kernels":
        variables["TRITON_INTERPRET"] = "1"
    log = options.output / f"{name}.log"
    started = time.monotonic()
    try:
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(command, env=variables, stdout=file, stderr=file, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"status": f"left out: took over {seconds:.0f} s"}
    finally:
        subprocess.run(["rm", "-rf", str(scratch / "run")], check=False)
    if done.returncode:
        return {"status": "failed", "log": log.read_text(encoding="utf-8")[-2000:]}
    found = json.loads((scratch / "result.json").read_text(encoding="utf-8"))
    return {"status": "ok", "seconds": round(time.monotonic() - started, 1), **found}


def made(name: str, options: argparse.Namespace) -> Path:
    """Return the directory of a model, whose random weights are made on the card if there is none yet."""
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    directory: Path = options.work / name
    if (directory / "config.json").exists():
        return directory
    kind, sizes = SHAPES[name]
    changes = TINY | (TINY_EXPERTS if "moe" in kind else {}) if options.dry_run else {}
    config = CONFIG_MAPPING[kind](**QWEN3 | sizes | changes, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if "int4" not in name:
        model.save_pretrained(directory, max_shard_size="2GB")
        return directory
    stored: dict[str, torch.Tensor] = {}
    for key, weight in model.state_dict().items():
        if ".layers." not in key or weight.dim() != 2:
            stored[key] = weight.cpu().contiguous()
            continue
        rows, columns = weight.shape
        stem, groups = key.removesuffix("weight"), columns // GROUP
        words = torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int64, device=weight.device).int()
        stored[f"{stem}weight_packed"] = words.cpu()
        stored[f"{stem}weight_scale"] = torch.full((rows, groups), 0.2 * columns**-0.5, dtype=torch.bfloat16)
        stored[f"{stem}weight_shape"] = torch.tensor([rows, columns])
    stored.pop("lm_head.weight", None)
    directory.mkdir()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    described = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}}}
    values = json.loads(config.to_json_string()) | {"dtype": "bfloat16", "architectures": [type(model).__name__]}
    values["quantization_config"] = {"quant_method": "compressed-tensors", **described}
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return directory


def earlier(path: Path) -> Row:
    """Return the results of an earlier run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found["rows"], dict):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    refuse(f"--from {path}: no results of this script; name the results.json that it wrote")


def save(results: Row, output: Path) -> None:
    """Replace results.json and the table at once each."""
    for name, text in (("results.json", json.dumps(results, indent=1, default=str)), ("results.md", table(results))):
        beside = output / f"{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(output / name)


def table(results: Row) -> str:
    """Return the results as Markdown."""
    lines = [
        f"{results['machine'].get('gpu', 'no GPU: its double')}, torch {results['machine']['torch']}",
        "",
        "| case | measured, s | planned, s | measured / planned | tokens/s | device peak / planned, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        if "measured_seconds" not in row:
            lines.append(f"| {name} | {row['status']}{', ' + str(row['cases']) if 'cases' in row else ''} | | | | |")
            continue
        measured, planned = row["measured_seconds"], row["planned_seconds"]
        peaks = f"{row['peak_bytes'] / GIB:.2f} / {row['planned_peak_bytes'] / GIB:.2f}"
        rate = row["tokens"] / measured
        lines.append(f"| {name} | {measured:.4f} | {planned:.4f} | {measured / planned:.2f} | {rate:.1f} | {peaks} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
