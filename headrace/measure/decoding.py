"""What a generation costs besides products: Python's operators, the next pass, rows, keys and values, decoding of weights.

Python is measured on a model so small that nothing else takes time, which goes the way of a generation: a seat, block by block.
"""

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.codec import Codec
from headrace.codec.table import CODES
from headrace.machine.protocol import Machine
from headrace.measure.compute_loads import BLOCKS, chain_of
from headrace.model.kernels.narrow import has_kernel, multiplied
from headrace.model.seats.generation_check import ready_to_generate, seat_taps
from headrace.model.seats.host_attention import attended
from headrace.model.seats.seats import Seat

_HIDDEN, _PROMPT, _PASSES = 64, 8, 14
# Weights that no cache holds, and how often they are multiplied.
_OUTPUTS, _INPUTS, _PRODUCTS = 8192, 4096, 9
# Rows, heads of keys, query heads to each, tokens, width of a head: 16 MiB of keys and values.
_ATTENDED = (8, 8, 4, 512, 128)

# The matrix that is decoded: none takes more than some tens of milliseconds.
_ROWS, _COLUMNS = 64, 4096
_REPEATS = 3


class _Counted(TorchDispatchMode):
    """Counts operators as `CostMeter` does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def decoding_seconds(machine: Machine) -> tuple[float, float]:
    """Return the seconds of one operator of a block's code, and those of a turn: the medians of a dozen passes of one row."""
    chain = chain_of(machine, "bfloat16", _HIDDEN, _PROMPT + _PASSES)
    ready_to_generate(chain.model)
    chain.move_buffers(machine.device)
    flats = [torch.zeros(layout.num_elements, dtype=chain.dtype, device=machine.device) for layout in chain.layouts]
    for unit in [unit for unit in range(len(flats)) if not 0 < unit <= BLOCKS]:
        chain.bind(unit, flats[unit], None)
    ids = torch.zeros((1, _PROMPT), dtype=torch.int64, device=machine.device)
    asked = {"max_new_tokens": _PASSES + 1, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    counted, blocks, turns = _Counted(), list[float](), list[float]()

    def pass_blocks(seat: Seat) -> None:
        for index in range(BLOCKS):
            assert seat.hidden is not None, "it is parked"
            chain.bind(index + 1, flats[index + 1], None, as_loaded=True)
            with chain.arithmetic():
                seat.hidden = chain.block(index, seat.hidden, seat.calls[index]).hidden
            chain.release(index + 1)

    with torch.no_grad(), seat_taps(chain.runner, chain.arithmetic) as taps:
        seat = Seat(taps, lambda: chain.model.generate(ids, attention_mask=torch.ones_like(ids), **asked), 0)
        try:
            seat.turn()
            pass_blocks(seat)
            seat.turn()
            with counted:
                pass_blocks(seat)
            seat.turn()
            while not seat.done:
                start = time.perf_counter()
                pass_blocks(seat)
                between = time.perf_counter()
                seat.turn()
                blocks.append(between - start)
                turns.append(time.perf_counter() - between)
        finally:
            seat.close()
    return median(blocks) / counted.calls, median(turns)


def row_product_rate(machine: Machine) -> float | None:
    """Return the bytes of bfloat16 weights per second that a CPU multiplies with one row, as generation does.

    None if it has no instructions for products of bfloat16, or for a GPU, whose products are as fast as its memory.
    """
    if machine.device.type != "cpu" or not machine.multiplies("bfloat16"):
        return None
    weights = torch.full((_OUTPUTS, _INPUTS), 0.01, dtype=torch.bfloat16)
    row, seconds = torch.ones((1, _INPUTS), dtype=torch.bfloat16), list[float]()
    multiply = multiplied if has_kernel() else torch.nn.functional.linear
    multiply(row, weights)  # the first one may compile the loop
    for _ in range(_PRODUCTS):
        start = time.perf_counter()
        multiply(row, weights)
        seconds.append(time.perf_counter() - start)
    return weights.nbytes / median(seconds)


def attended_rate() -> float:
    """Return the bytes of keys and values per second that all cores read when the host computes attention. Numbers are
    bfloat16, heads have 128, and four query heads share one head of keys.
    """
    rows, heads, group, tokens, width = _ATTENDED
    numbers = torch.full((tokens, 2 * rows * heads * width), 0.01, dtype=torch.bfloat16)
    keys, values = (part.view(tokens, rows, heads, width).permute(1, 2, 0, 3) for part in numbers.chunk(2, dim=1))
    query, seconds = torch.full((rows, heads * group, 1, width), 0.1, dtype=torch.float32), list[float]()
    for _ in range(_PRODUCTS + 1):
        start = time.perf_counter()
        attended(query, numbers.view(torch.uint8).view(-1), keys, values)
        seconds.append(time.perf_counter() - start)
    return numbers.nbytes / median(seconds[1:])  # the first one may compile the loop


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
