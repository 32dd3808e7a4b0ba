"""The compute lane: forward and backward of a block and of the head, through the code that training runs.

Operations are counted as by the planner (`model.costs.cost_profile`). A backward counts three times its forward, because it
computes the block again; twice for the head, which is not computed again. What takes time besides matrix products is found by
fitting the seconds of several shapes: `fitted_rates`.
"""

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from headrace.machine.host_memory import keep_freed_memory
from headrace.machine.protocol import Machine
from headrace.measure.loads import Load, rate_of
from headrace.model import Chain, GradientSink, MicroBatch, WideProducts
from headrace.terms.layout import ParameterSpec
from headrace.terms.options.optimizer import Optimizer

BLOCKS = 2
_VOCABULARY = 512
_HEAD_VOCABULARY = 16384
_HEAD_WIDTH = 64


class BlockLoad:
    """One micro-batch of `tokens` through a block of `hidden_size` in `compute_dtype`: forward, recompute, backward."""

    def __init__(self, machine: Machine, compute_dtype: str, *, hidden_size: int, tokens: int) -> None:
        self._machine = machine
        self._chain = chain_of(machine, compute_dtype, hidden_size, tokens)
        # As `model.costs.cost_profile` counts, which takes half a second: four projections, three of the MLP, two of attention.
        inner = int(self._chain.config.intermediate_size)
        self.product_flops = 4 * 2.0 * tokens * hidden_size * (4 * hidden_size + 3 * inner)
        self.flops = self.product_flops + 4 * 4.0 * tokens * tokens * hidden_size
        self.hidden_elements = tokens * hidden_size
        device, dtype = machine.device, self._chain.dtype
        self._chain.move_buffers(device)
        ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)
        resident = (0, BLOCKS + 1) if self._chain.has_epilogue_unit else (0,)
        for unit in resident:
            self._chain.bind(unit, torch.zeros(self._chain.layouts[unit].num_elements, dtype=dtype, device=device), None)
        with torch.no_grad():
            self._call: Any = self._chain.prologue(MicroBatch(ids, ids)).calls[0]
        elements = self._chain.layouts[1].num_elements
        # Neither zeros, which some hardware multiplies at less power, nor large numbers, which would overflow in 16 bits.
        self._flat = torch.empty(elements, dtype=dtype, device=device).uniform_(-0.02, 0.02)
        self._sink = _adding_to(torch.zeros(elements, dtype=torch.float32, device=device))
        self._hidden = torch.empty((1, tokens, hidden_size), dtype=dtype, device=device).uniform_(-1, 1)

    def unit(self) -> float:
        """Run the micro-batch once."""
        with self._chain.arithmetic():
            self._run()
        _finish(self._machine)
        return self.flops

    def _run(self) -> None:
        chain = self._chain
        chain.bind(1, self._flat, None)
        with torch.no_grad():
            chain.block(0, self._hidden, self._call)
        chain.bind(1, self._flat, self._sink)
        with torch.enable_grad():
            leaf = self._hidden.detach().requires_grad_()
            out = chain.block(0, leaf, self._call)
            torch.autograd.backward([out.hidden], [self._hidden])
        chain.release(1)


class AttentionLoad:
    """Attention of `shape` (rows, heads, length, width of a head) in bfloat16: forward, recompute, backward."""

    def __init__(self, machine: Machine, shape: tuple[int, int, int, int]) -> None:
        self._machine = machine
        rows, heads, length, width = shape
        # Two products of two operations, four times over: as the planner counts attention.
        self.flops = 4 * 4.0 * rows * heads * length * length * width
        self._query, self._key, self._value = (
            torch.empty(shape, dtype=torch.bfloat16, device=machine.device).uniform_(-1, 1).requires_grad_() for _ in range(3)
        )
        self._gradient = torch.ones(shape, dtype=torch.bfloat16, device=machine.device)
        self._wide = not machine.multiplies("bfloat16")

    def unit(self) -> float:
        """Run it once."""
        with WideProducts() if self._wide else nullcontext():
            self._run()
        _finish(self._machine)
        return self.flops

    def _run(self) -> None:
        with torch.no_grad():
            scaled_dot_product_attention(self._query, self._key, self._value, is_causal=True)
        with torch.enable_grad():
            out = scaled_dot_product_attention(self._query, self._key, self._value, is_causal=True)
            torch.autograd.grad([out], [self._query, self._key, self._value], [self._gradient])


class HeadLoad:
    """One chunk of `tokens` positions through a head of `hidden_size` in bfloat16: logits, loss, gradients."""

    def __init__(self, machine: Machine, *, hidden_size: int, tokens: int) -> None:
        self._machine = machine
        self._chain = chain_of(machine, "bfloat16", hidden_size, tokens, _HEAD_VOCABULARY)
        device, layouts = machine.device, self._chain.layouts
        self.logits, self.parameters = tokens * _HEAD_VOCABULARY, hidden_size * _HEAD_VOCABULARY
        self.flops = 6.0 * tokens * self.parameters
        self._last = len(layouts) - 1
        self._chain.move_buffers(device)
        self._chain.bind(0, torch.zeros(layouts[0].num_elements, dtype=torch.bfloat16, device=device), None)
        elements = layouts[-1].num_elements
        self._flat = torch.empty(elements, dtype=torch.bfloat16, device=device).uniform_(-0.02, 0.02)
        self._sink = _adding_to(torch.zeros(elements, dtype=torch.float32, device=device))
        self._hidden = torch.empty((1, tokens, hidden_size), dtype=torch.bfloat16, device=device).uniform_(-1, 1)
        self._ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)

    def unit(self) -> float:
        """Run the chunk once."""
        self._chain.bind(self._last, self._flat, self._sink)
        with torch.enable_grad(), self._chain.arithmetic():
            loss = self._chain.loss_sum(self._ids, self._hidden.detach().requires_grad_(), self._ids)
            loss.backward()  # type: ignore[no-untyped-call]
        self._chain.release(self._last)
        _finish(self._machine)
        return self.flops


def fitted_rates(amounts: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the seconds for one of each of two kinds of work, of which `amounts` were done in `seconds`.

    They minimise the squares of relative errors, and neither is below zero. If the best fit would have one below zero, it is
    zero and the other explains all. Both are zero where there is no time to explain.
    """
    if not any(seconds):
        return 0.0, 0.0
    longest = max(seconds)
    table, taken = np.asarray(amounts, dtype=np.float64), np.asarray(seconds, dtype=np.float64) / longest
    scale = np.maximum(taken, 1e-6)  # what takes hardly any time must not outweigh all else
    wanted = taken / scale
    best, least = np.zeros(2), float((wanted**2).sum())
    for columns in ([0], [1], [0, 1]):
        part = table[:, columns] / scale[:, None]
        found, *_ = np.linalg.lstsq(part, wanted, rcond=None)
        error = float(((part @ found - wanted) ** 2).sum())
        if (found >= 0).all() and error < least - 1e-12:  # rounding must not prefer the second of two exact fits
            best, least = np.zeros(2), error
            best[columns] = found
    return float(best[0] * longest), float(best[1] * longest)


def fresh_pages_share(load: Load, seconds: float, rounds: int) -> float:
    """Return the share of its rate that `load` keeps where freed memory is given back to the kernel; afterwards it is kept.

    The two are measured in this order and not in turns. Memory that a heap has kept once is never mapped afresh again, whatever
    the setting.
    """
    rates = []
    for keep in (False, True):
        keep_freed_memory(keep)
        load.unit()
        rates.append(statistics.median(rate_of(load, seconds) for _ in range(rounds)))
    return min(1.0, rates[0] / rates[1])


def _adding_to(accumulator: torch.Tensor) -> GradientSink:
    """Return a sink that adds a parameter's gradient to its place in `accumulator`, as a step does."""

    def add(parameter: ParameterSpec, gradient: torch.Tensor) -> None:
        accumulator[parameter.offset : parameter.offset + parameter.num_elements].add_(gradient.reshape(-1))

    return add


def _finish(machine: Machine) -> None:
    if machine.device.type == "cuda":
        torch.cuda.synchronize(machine.device)


def chain_of(machine: Machine, compute_dtype: str, hidden_size: int, tokens: int, vocabulary: int = _VOCABULARY) -> Chain:
    """Return a Llama of `BLOCKS` blocks, for `tokens` positions."""
    heads = max(1, hidden_size // _HEAD_WIDTH)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,  # 5504 of 2048, the proportion of Llama
        num_hidden_layers=BLOCKS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=tokens,
    )
    chain = Chain.from_config(config, compute_dtype, Optimizer())
    chain.take_head_by(0)  # as rates are counted; ranges of rows are priced by them
    if not machine.multiplies(compute_dtype):
        chain.multiply_wide()
    return chain
