"""How many coded weights one core decodes in a second, by kind of code: the codecs' own `decode`, as it fills slots."""

import time

import torch

from headrace.codec import Codec
from headrace.codec.table import CODES

# The matrix that is decoded: none takes more than some tens of milliseconds.
_ROWS, _COLUMNS = 64, 4096
_REPEATS = 3


def decoded_per_second() -> dict[str, float]:
    """Return weights a second of one core to bfloat16, by kind: the least processor time of a few counts."""
    normal = torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    contestants = {
        code.kind: ((code.measured or code.codec)(), code.sample(_ROWS, _COLUMNS) if code.sample else normal)
        for code in CODES.values()
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
