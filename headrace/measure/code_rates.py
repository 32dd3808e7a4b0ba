"""How many coded weights one core decodes in a second, by kind of code: the codecs' own `decode`, as it fills slots."""

import time

import torch

from headrace.codec import Codec
from headrace.codec.dictionary import QMOE_ZEROS, Dictionary
from headrace.codec.published import Fp8Blocks, Mxfp4, Nf4, PackQuantized
from headrace.codec.ternary import TritsCodec, WordsCodec

# The matrix that is decoded: none takes more than some tens of milliseconds.
_ROWS, _COLUMNS = 64, 4096
_REPEATS = 3


def decoded_per_second() -> dict[str, float]:
    """Return weights a second of one core to bfloat16, by kind: the least processor time of a few counts."""
    drawn = torch.Generator().manual_seed(0)
    normal = torch.randn(_ROWS, _COLUMNS, generator=drawn)
    share = torch.rand(_ROWS, _COLUMNS, generator=drawn)
    zeros = QMOE_ZEROS / 1000
    ternary = torch.where(share < zeros, 0.0, torch.where(share < (1 + zeros) / 2, -1.0, 1.0))
    contestants: dict[str, tuple[Codec, torch.Tensor]] = {
        "pack": (PackQuantized(128), normal),
        "ternary": (WordsCodec(Dictionary.build()), ternary),
        "trits": (TritsCodec(), ternary),
        "fp8": (Fp8Blocks(), normal),
        "mxfp4": (Mxfp4(_ROWS), normal),
        "nf4": (Nf4(), normal),
    }
    threads, into = torch.get_num_threads(), torch.empty(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    try:
        return {kind: _ROWS * _COLUMNS / _least_seconds(codec, weights, into) for kind, (codec, weights) in contestants.items()}
    finally:
        torch.set_num_threads(threads)


def _least_seconds(codec: Codec, weights: torch.Tensor, into: torch.Tensor) -> float:
    parts, taken = codec.encode(weights), []
    for _ in range(_REPEATS + 1):  # the first compiles
        begin = time.thread_time()
        codec.decode(parts, into, range(len(weights)))
        taken.append(time.thread_time() - begin)
    return min(taken)
