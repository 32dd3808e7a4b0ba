"""A job whose keys and values lie on a drive, in a process of its own that may be killed. Run by `test_caches`."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.screen import say
from headrace.generate.passes.seat_caches import CacheFile, SeatCache
from headrace.generate.passes.whose_weights import open_generator
from headrace.generate.plan.cache_plan import SSD, CachePlan, with_inputs
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.plan.search import GenerationQuestion, make_generation_plan
from headrace.generate.uses.jobs import run_job
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.sizes import PAGE_BYTES


def in_tiers(patch: pytest.MonkeyPatch, *, by_inputs: bool = False) -> None:
    """Have all plans put the caches of all blocks on the drives, with or without prompts as inputs."""

    def on_drives(question: GenerationQuestion) -> GenerationPlan:
        plan = make_generation_plan(question)
        caches = CachePlan(homes=(SSD,) * plan.num_blocks, slots=2, page_bytes=PAGE_BYTES)
        return replace(plan, caches=[*with_inputs(caches, plan.costs)][-1] if by_inputs else caches)

    patch.setattr("headrace.generate.passes.planner.make_generation_plan", on_drives)


def job(model: Path, folder: Path, ssd: Path | None, code: str | None = None) -> int:
    """Answer `folder`'s prompts, with caches that may lie in `ssd`, coded or not."""
    options = GenerateOptions.of(
        {
            "input": folder / "in.jsonl",
            "output": folder / "out.jsonl",
            "max_new_tokens": 20,
            "rows": 3,
            "seats": 2,
            "temperature": 0.8,
            "host_memory": "4GiB",
            "cache_dtype": code,
            "ssd": () if ssd is None else (ssd,),
        }
    )
    with open_generator(model, options, say) as generator:
        return run_job(generator, options, sink=say, tell_plan=lambda plan: None, progress=lambda found: None)


def main(model: str, folder: str, name: str, kill_at: int, by_inputs: bool = False, code: str | None = None) -> None:
    """Run the job; at call number `kill_at` the process is killed: `read` or `write` a `CacheFile`, `keep` new tokens."""
    owner, name = (SeatCache, "write") if name == "keep" else (CacheFile, name)
    with pytest.MonkeyPatch.context() as patch:
        in_tiers(patch, by_inputs=by_inputs)
        own: Callable[..., Any] = getattr(owner, name)
        calls: list[int] = []

        def counted(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*args)

        patch.setattr(owner, name, counted)
        job(Path(model), Path(folder), Path(folder), code)
