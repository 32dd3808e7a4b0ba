"""How fast a core goes through keys and values as it attends for one token: the host's loop, torch's attention, reading alone.

    python bench/host_attention.py [--rounds 5] [--tokens 1024]

All three take turns on one thread, on the same bytes, and count the processor's seconds: what else runs counts for nothing.
Each line has the medians in GB/s of keys and values, and of the rounds' ratios.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.model.seats.host_attention import attended

# Rows, heads of keys, query heads to each, width of a head.
SHAPES = ((16, 8, 4, 128), (16, 32, 1, 128), (16, 4, 16, 128), (16, 8, 4, 64))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measure(dtype: torch.dtype, shape: tuple[int, int, int, int], tokens: int, rounds: int) -> str:
    rows, heads, group, width = shape
    numbers = torch.randn(tokens, 2 * rows * heads * width).to(dtype)
    keys, values = (part.view(tokens, rows, heads, width).permute(1, 2, 0, 3) for part in numbers.chunk(2, dim=1))
    query, mask = torch.randn(rows, heads * group, 1, width) * width**-0.5, torch.ones(rows, 1, 1, tokens, dtype=torch.bool)
    memory = numbers.view(torch.uint8).view(-1)
    packed = query.view(rows, heads, group, width).to(dtype)
    contestants: dict[str, Callable[[], object]] = {
        "loop": lambda: attended(query, memory, keys, values, mask),
        "torch": lambda: scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=1.0),
        "reading": lambda: memory.view(torch.int64).sum(),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            start = time.thread_time()
            run()
            if number:  # the first one compiles, and warms up
                rates[name].append(memory.numel() / (time.thread_time() - start) / 1e9)
    found = {name: median(each) for name, each in rates.items()}
    ratio = median(one / other for one, other in zip(rates["loop"], rates["torch"], strict=True))
    figures = " | ".join(f"{found[name]:.2f}" for name in contestants)
    return f"| {str(dtype).removeprefix('torch.')} | {rows} x {heads} x {group} x {width} | {figures} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| numbers | rows x heads of keys x group x width | loop | torch | reading | loop / torch |\n|---|---|---|---|---|---|"
    )
    for dtype in DTYPES:
        for shape in SHAPES:
            print(measure(dtype, shape, asked.tokens, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
