"""One row, all of the model in memory: seconds a token and before the first, here and in llama.cpp, on the same weights.

    PYTHONPATH=DIR python bench/beside_llama_cpp.py MODEL --scratch DISK [--tokens 48] [--rounds 5]

where `pip install --no-deps --target DIR xllamacpp` has put a built llama.cpp into DIR. MODEL is a directory with weights in
bfloat16 and a tokenizer; llama.cpp reads a GGUF file of it, which is written to DISK. Contestants are llama.cpp, Headrace, and
Headrace without narrow products. They take turns, each in a process of its own, with as many threads as cores. Tokens are
greedy, after a prompt of 16. Printed are medians of the rounds, and the median of our time over that of llama.cpp.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from launch import environment, require_disk, scratch_directory

PROMPT = tuple(range(10, 26))
THEIRS, OURS, TORCH = "llama.cpp", "headrace", "headrace, torch's products"


def our_run(model: Path, tokens: int, narrow: bool) -> dict[str, float]:
    """Return what passes took here."""
    import headrace

    headrace.set_process_defaults()
    from headrace.generate.passes.generator import Generator
    from headrace.terms.events import GenerationPass

    seconds: list[float] = []

    def note(event: Any) -> None:
        if isinstance(event, GenerationPass):
            seconds.append(event.seconds)

    changes: dict[str, Any] = {"compute_dtype": "bfloat16", "rows": 1, "seats": 1, "narrow_products": narrow}
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    with Generator.open(model, sink=note, **changes) as generator:
        begun = time.perf_counter()
        generator.prepare(1, len(PROMPT), tokens)
        prepared = time.perf_counter() - begun
        list(generator.generate([PROMPT], **asked))
        first = prepared + seconds[0]
        seconds.clear()
        list(generator.generate([PROMPT], **asked))
    return {"token": median(seconds[1:]), "prompt": seconds[0], "first": first}


def their_run(file: Path, tokens: int) -> dict[str, float]:
    """Return what llama.cpp says that its passes took."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.fit_params, parameters.n_gpu_layers = 512, 1, False, 0
    parameters.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    threads = len(os.sched_getaffinity(0))
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    begun = time.perf_counter()
    server = xllamacpp.Server(parameters)
    loaded = time.perf_counter() - begun
    asked = {"prompt": list(PROMPT), "n_predict": tokens, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
    cold = server.handle_completions(asked)["timings"]
    warm = server.handle_completions(asked)["timings"]
    return {
        "token": warm["predicted_per_token_ms"] / 1000,
        "prompt": warm["prompt_ms"] / 1000,
        "first": loaded + cold["prompt_ms"] / 1000,
    }


def run(name: str, model: Path, file: Path, tokens: int) -> dict[str, float]:
    """Run a contestant in a process of its own."""
    command = [sys.executable, __file__, str(model), "--scratch", str(file), "--tokens", str(tokens), "--work", name]
    done = subprocess.run(command, env=environment(omp_wait_policy="passive"), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Print a table."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", type=Path)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--work", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.work:
        found = (
            their_run(given.scratch, given.tokens)
            if given.work == THEIRS
            else our_run(given.model, given.tokens, given.work == OURS)
        )
        print(json.dumps(found))
        return
    from headrace.apps import write_gguf

    names, runs = (THEIRS, OURS, TORCH), list[dict[str, dict[str, float]]]()
    with scratch_directory(given.scratch) as scratch:
        require_disk(scratch, 2 * sum(file.stat().st_size for file in given.model.glob("*.safetensors")), "the model as GGUF")
        file = scratch / "model.gguf"
        write_gguf(given.model, file, "bf16")
        for _ in range(given.rounds):
            runs.append({name: run(name, given.model, file, given.tokens) for name in names})
    print("| | ms a token | over llama.cpp's | ms of a later prompt | s before the first token |\n|---|---|---|---|---|")
    for name in names:
        token, prompt, first = (median(each[name][what] for each in runs) for what in ("token", "prompt", "first"))
        times = median(each[name]["token"] / each[THEIRS]["token"] for each in runs)
        print(f"| {name} | {1000 * token:.1f} | {times:.2f} | {1000 * prompt:.0f} | {first:.2f} |")


if __name__ == "__main__":
    main()
