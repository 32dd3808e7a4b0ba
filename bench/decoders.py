"""How many coded weights one core decodes in a second, by code: what plans of coded models rest on.

    python bench/decoders.py [--repeats 7]

A matrix of 1024 x 4096; CPU seconds of this thread, the best of the repeats.
"""

import argparse
import time

import torch
from ternary import ZEROS, ternary_weights

from headrace.codec import Codec, Parts
from headrace.codec.bf16x12 import Bf16x12
from headrace.codec.dictionary import Dictionary
from headrace.codec.published import Fp8Blocks, GgufBlocks, Mxfp4, Nf4, PackQuantized
from headrace.codec.ternary import TritsCodec, WordsCodec

ROWS, COLUMNS = 1024, 4096


def main() -> None:
    """Print a line for each code."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=7)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    normal = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02
    ternary = ternary_weights(ROWS, COLUMNS, ZEROS)
    codecs: list[tuple[Codec, torch.Tensor]] = [(WordsCodec(Dictionary.build()), ternary), (TritsCodec(), ternary)]
    codecs += [(each, normal) for each in (PackQuantized(128), PackQuantized(128, symmetric=False), Fp8Blocks(), Nf4())]
    codecs += [(PackQuantized(128, "float16"), normal), (Mxfp4(ROWS), normal), (Bf16x12(), normal)]
    codecs += [(GgufBlocks(kind), normal) for kind in ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")]
    for codec, weights in codecs:
        parts, found = _parts(codec, weights), []
        for dtype in (torch.float16 if codec.name.endswith("float16") else torch.bfloat16, torch.float32):
            into, best = torch.empty(ROWS, COLUMNS, dtype=dtype), float("inf")
            for _ in range(given.repeats):
                begin = time.thread_time()
                codec.decode(parts, into, range(ROWS))
                best = min(best, time.thread_time() - begin)
            found.append(f"{str(dtype)[6:]} {ROWS * COLUMNS / best / 1e9:.2f}")
        print(f"{codec.name:36} G weights/s to {', '.join(found)}", flush=True)


def _parts(codec: Codec, weights: torch.Tensor) -> Parts:
    """Return parts of weights, or any bytes of codes that are only read."""
    if not isinstance(codec, GgufBlocks) or codec.kind == "Q8_0":
        return codec.encode(weights)
    places = {part.name: part.shape for part in codec.places(ROWS, COLUMNS)}
    return {name: torch.randint(0, 256, shape, dtype=torch.uint8) for name, shape in places.items()}


if __name__ == "__main__":
    main()
