"""The simulator against published measurements: prints the table of `docs/published.md`.

    python bench/published.py                               # print
    python bench/published.py --output docs/published.md    # write

Of one GPU (`fuyou.py`), of workers with a node (`luwu.py`), and of generation (`offloaded.py`).

Needs no GPU and takes half a minute. Exit code 1 if a point that the constants saw is off by more than 10 %.
"""

import argparse
import math
from functools import lru_cache, partial
from pathlib import Path

import luwu
import offloaded
from fuyou import (
    COMPUTE_FLOPS_PER_SECOND,
    READ_BYTES_PER_SECOND,
    WRITE_BYTES_PER_SECOND,
    Point,
    Shape,
    compare,
    fuyou_ceilings,
    table,
)
from transformers import GPT2Config

from headrace.model import Chain, Profiles
from headrace.plan.forecast.forecast import forecast
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import make_plan
from headrace.plan.value.allowance import Allowance
from headrace.plan.value.workload import Workload
from headrace.terms.errors import PlanInfeasible
from headrace.terms.forms import in_place_forms
from headrace.terms.sizes import GIB
from headrace.update import rule_of
from headrace.update.rules.adamw import AdamW

TOLERANCE = 0.10

HEADER = """# The simulator against published measurements

The program is Fuyou's own policy: the whole batch layer by layer, the optimizer behind backward only. It runs on the virtual
clock of `headrace plan`, for one RTX 4090 with 12 SSDs and sequence length 1024. Published figures are the raw data of the
Fuyou papers (arXiv 2403.06504). Three constants stand for that system, the same for every line: {compute:.0f} TFLOPS of
compute, {read:.0f} GB/s read and {write:.0f} GB/s written. They were chosen on the 13B lines; the 175B lines are a check.
Compute and write agree with a fit of a closed formula to all published points. TFLOPS count 6 operations per parameter and
token.

The Headrace column has the same machine and constants under Headrace's own plan and program. Its model is a GPT-2 block of that
width from transformers; 22 GiB of device and 700 GiB of host memory are allowed (nan: it does not fit). Where it differs:

- Small batches are bound by the SSDs in both. Headrace's bf16 weight is half of its master, and weights stay in host memory as
  far as they fit. So it reads 10 to 14 bytes per parameter and writes 12, instead of 16 and 14. Its writes continue into the
  next forward.
- Large batches are bound by compute. The compute constant is an effective rate of 6 operations per parameter and token that
  already contains Fuyou's recompute. Headrace's recompute is counted on top of it, so this column is too low there. Replay
  avoids most of it: from batch 32 on the outputs of four operators of each 13B block wait in host memory (113 to 451 GiB).

Made by `python bench/published.py --output docs/published.md`.

"""


@lru_cache
def chain_of(shape: Shape) -> Chain:
    config = GPT2Config(
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.hidden_size // 128,
        n_positions=1024,
        vocab_size=shape.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return Chain.from_config(config, "bfloat16", AdamW())


def headrace_seconds(point: Point) -> float:
    """Return the forecast step time of Headrace's plan for a published point, NaN where it does not fit."""
    chain = chain_of(point.shape)
    costs, rule = partial(Profiles(chain).of, length=1024), rule_of(AdamW(), "bfloat16").figures
    problem = Problem(
        forms=in_place_forms(chain.layouts, chain.num_blocks, rule),
        rule=rule,
        costs_of=costs,
        workload=Workload(tokens_per_step=point.tokens, sequence_length=1024, clip=False),
        allowance=Allowance(host_bytes=700 * GIB, device_bytes=22 * GIB, runtime_bytes=GIB, cores=52),
    )
    try:
        return forecast(make_plan(problem, fuyou_ceilings()), fuyou_ceilings()).step_seconds
    except PlanInfeasible:
        return math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the page here instead of printing it")
    arguments = parser.parse_args()
    rows = compare(headrace_seconds)
    page = HEADER.format(
        compute=COMPUTE_FLOPS_PER_SECOND / 1e12, read=READ_BYTES_PER_SECOND / 1e9, write=WRITE_BYTES_PER_SECOND / 1e9
    ) + table(rows)
    page += luwu.PAGE.format(rows=luwu.table()) + offloaded.page()
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(page, encoding="utf-8")
    return int(any(row.point.fitted and abs(row.ratio - 1) > TOLERANCE for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
