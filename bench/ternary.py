"""How fast ternary weights are decoded and multiplied on one core, and how small they are.

    python bench/ternary.py [--seconds 20] [--out ternary.json]

Each round runs every contestant twice and times the second run, so that a busy moment of the machine hits all of them, and each
finds its own table in the cache; CPU seconds of this thread, the best of the rounds. `28 lanes` is the decoding loop as QMoE's
kernel has it: of each word 28 weights, and nothing beside them in the table; `32 lanes` is the project's. Both fill bfloat16,
once into a matrix that stays in the second-level cache (64 x 4096) and once into one that does not (2048 x 4096). GB/s are
bytes of bfloat16 made.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.codec.dictionary import Dictionary
from headrace.codec.ternary import TritsCodec, WordsCodec, parts_bytes
from headrace.machine.jit import compiled

ZEROS = 0.885
SHAPES = ((64, 4096), (2048, 4096))
_LANES = 28


@compiled
def decode_28_lanes(words, row_offsets, lanes, lengths, low, high, out):
    """Fill `out` (rows, columns + 28) uint16: each row has room for what is too much."""
    for row in range(out.shape[0]):
        at, into, least, most = 0, out[row], low[row], high[row]
        for place in range(row_offsets[row], row_offsets[row + 1]):
            word = words[place]
            for lane in range(_LANES):
                symbol = lanes[word, lane]
                into[at + lane] = (least & np.uint16(-(symbol & 1))) | (most & np.uint16(-(symbol >> 1)))
            at += lengths[word]


def ternary_weights(rows: int, columns: int, zeros: float, seed: int = 0) -> torch.Tensor:
    """Return weights of which a share of `zeros` is zero, bfloat16."""
    drawn = np.random.default_rng(seed).random((rows, columns))
    values = np.where(drawn < zeros, 0, np.where(drawn < (1 + zeros) / 2, -0.03125, 0.0625))
    return torch.from_numpy(values).to(torch.bfloat16)


def best_of(contestants: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the least CPU seconds of each contestant, in rounds of all until `seconds` have passed."""
    for run in contestants.values():
        run()
    best, end = dict.fromkeys(contestants, float("inf")), time.monotonic() + seconds
    while time.monotonic() < end:
        for name, run in contestants.items():
            run()
            begin = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - begin)
    return best


def decoding(rows: int, columns: int, seconds: float) -> dict[str, float]:
    """Return GB/s of bfloat16 by contestant."""
    dictionary, weights = Dictionary.build(), ternary_weights(rows, columns, ZEROS)
    words, trits = WordsCodec(dictionary), TritsCodec()
    parts, in_trits = words.encode(weights), trits.encode(weights)
    into, room = torch.empty_like(weights), np.zeros((rows, columns + _LANES), np.uint16)
    wide = torch.empty(rows, columns)
    low, high = (parts["levels"].view(torch.int16).numpy().view(np.uint16)[:, side].copy() for side in (0, 1))
    lanes, lengths = dictionary.lanes[:, :_LANES].copy(), dictionary.lengths
    codes, offsets = parts["codes"].numpy(), parts["row_offsets"].numpy()
    contestants: dict[str, Callable[[], Any]] = {
        "32 lanes": lambda: words.decode(parts, into, range(rows)),
        "28 lanes": lambda: decode_28_lanes(codes, offsets, lanes, lengths, low, high, room),
        "32 lanes to float32": lambda: words.decode(parts, wide, range(rows)),
        "trits": lambda: trits.decode(in_trits, into, range(rows)),
        "encoding": lambda: words.encode(weights),
    }
    best = best_of(contestants, seconds)
    assert torch.equal(into, weights)
    assert np.array_equal(room[:, :columns], weights.view(torch.int16).numpy().view(np.uint16))
    return {name: 2e-9 * rows * columns / found for name, found in best.items()}


def main() -> None:
    """Print tables, and write them as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=20.0)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for rows, columns in SHAPES:
        rates = decoding(rows, columns, given.seconds)
        found[f"{rows}x{columns}"] = rates
        told = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items())
        print(f"{rows} x {columns}, GB/s: {told}; 32 over 28 lanes {rates['32 lanes'] / rates['28 lanes']:.2f}")
    for zeros in (0.76, 0.80, 0.84, 0.885, 0.93):
        weights = ternary_weights(256, 6144, zeros)
        sizes = {885: 0.0, round(1000 * zeros): 0.0}
        for table in sizes:
            sizes[table] = 8 * parts_bytes(WordsCodec(Dictionary.build(table)).encode(weights)) / weights.numel()
        found[f"bits at {zeros}"] = sizes
        print(f"zeros {zeros}: " + ", ".join(f"dictionary {table}: {bits:.3f} bits a weight" for table, bits in sizes.items()))
    if given.out:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
