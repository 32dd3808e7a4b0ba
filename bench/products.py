"""Products of coded weights on one core, by rows: library kernels, decode-then-multiply, and by tiles that stay in the cache.

    python bench/products.py [--seconds 20] [--out products.json]

A matrix of 4096 x 4096 times 1, 4, 16 and 32 rows. Each round runs every contestant twice and times the second run, so that a
busy moment of the machine hits all, and each finds its own tables in the cache; CPU seconds of this thread, the best of the
rounds. Beside each is how many times as fast it is as the product with decoded weights, in the dtype in which that is fastest;
3.87 is what four bits can give where reading weights is all there is to it (MARLIN). Results are compared first.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ternary import ZEROS, ternary_weights

from headrace.codec import Codec, Parts
from headrace.codec.dictionary import Dictionary
from headrace.codec.published import PackQuantized
from headrace.codec.ternary import TritsCodec, WordsCodec

SIDE, GROUP = 4096, 128
NUM_ROWS = (1, 4, 16, 32)
TILES = (16, 64)


def decode_then_multiply(codec: Codec, parts: Parts, dtype: torch.dtype, tile: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product by way of `tile` decoded rows at a time."""
    room = torch.empty(tile, SIDE, dtype=dtype)

    def multiply(inputs: torch.Tensor) -> torch.Tensor:
        wide, out = inputs.to(dtype), torch.empty(len(inputs), SIDE, dtype=dtype)
        for start in range(0, SIDE, tile):
            codec.decode(parts, room, range(start, start + tile))
            out[:, start : start + tile] = wide @ room.T
        return out

    return multiply


def library_kernel(parts: Parts) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torch's product with four bits, whose layout depends on the processor, and is made here."""
    packed = parts["weight_packed"].view(torch.uint8)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).view(SIDE, SIDE).to(torch.int32)
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
    scales = parts["weight_scale"].T
    sides = torch.stack([scales, torch.zeros_like(scales)], dim=-1).contiguous()  # codes stand for code - 8 there, too
    return lambda inputs: torch.ops.aten._weight_int4pack_mm_for_cpu(inputs, words, GROUP, sides)


def contestants() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return all by name, with `dense` ones first."""
    int4, words, trits = PackQuantized(GROUP), WordsCodec(Dictionary.build()), TritsCodec()
    drawn = (torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    coded = {"int4": (int4, int4.encode(drawn))}
    ternary = ternary_weights(SIDE, SIDE, ZEROS)
    coded |= {"words": (words, words.encode(ternary)), "trits": (trits, trits.encode(ternary))}
    dense = torch.empty(SIDE, SIDE, dtype=torch.bfloat16)
    int4.decode(coded["int4"][1], dense, range(SIDE))
    wide = dense.float()
    found: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "dense bfloat16": lambda inputs: inputs @ dense.T,
        "dense float32": lambda inputs: inputs.float() @ wide.T,
        "int4 library": library_kernel(coded["int4"][1]),
    }
    for name, (codec, parts) in coded.items():
        for dtype in (torch.bfloat16, torch.float32):
            if name == "int4" and dtype == torch.float32:
                continue  # its loop makes bfloat16
            for tile in (SIDE, *TILES):
                how = "whole" if tile == SIDE else f"{tile} rows"
                found[f"{name} {str(dtype)[6:]}, {how}"] = decode_then_multiply(codec, parts, dtype, tile)
    return found


def check(found: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> None:
    """Compare what has one meaning."""
    inputs = torch.randn(4, SIDE).bfloat16()
    first: dict[str, torch.Tensor] = {}
    for name, run in found.items():
        meaning = "ternary" if name.startswith(("words", "trits")) else "int4"
        made = run(inputs).float()
        expected = first.setdefault(meaning, made)
        assert float((made - expected).norm() / expected.norm()) < 0.01, name


def measure(found: dict[str, Callable[[torch.Tensor], torch.Tensor]], rows: int, seconds: float) -> dict[str, float]:
    """Return the least CPU seconds of each."""
    inputs = torch.randn(rows, SIDE).bfloat16()
    best, end = dict.fromkeys(found, float("inf")), time.monotonic() + seconds
    while True:
        for name, run in found.items():
            run(inputs)
            begin = time.thread_time()
            run(inputs)
            best[name] = min(best[name], time.thread_time() - begin)
        if time.monotonic() > end:
            return best


def main() -> None:
    """Print a table, and write it as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=20.0, help="for each number of rows")
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    found = contestants()
    check(found)
    results: dict[str, Any] = {}
    for rows in NUM_ROWS:
        results[str(rows)] = best = measure(found, rows, given.seconds)
        ideal = min(best["dense bfloat16"], best["dense float32"])
        print(f"{rows} rows: milliseconds, times as fast as dense")
        for name, taken in best.items():
            print(f"  {name:26} {1e3 * taken:8.2f} {ideal / taken:6.2f}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
