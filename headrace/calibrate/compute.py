"""The compute lane: forward and backward of a block, through the code that training runs.

Operations are counted as the planner counts them (`model.profile`): a forward, and a backward of three times that, for it
computes the block again. So whatever a library does besides its matrix products is in the rate, as it is in a step.
"""

import statistics
from typing import Any

import torch
from transformers import LlamaConfig

from headrace.calibrate.base import Load, rate_of
from headrace.machine import Machine, keep_freed_memory
from headrace.model import Chain, MicroBatch, profile
from headrace.spec.layout import ParameterSpec
from headrace.spec.optimizer import AdamW

_BLOCKS = 2
_VOCABULARY = 512
_HEAD_WIDTH = 64


class BlockLoad:
    """One micro-batch of `tokens` through a block of `hidden_size` in `compute_dtype`: forward, recompute, backward."""

    def __init__(self, machine: Machine, compute_dtype: str, *, hidden_size: int, tokens: int) -> None:
        self._machine = machine
        self._chain = _chain(compute_dtype, hidden_size, tokens)
        costs = profile(self._chain, 1, tokens)
        self._flops = 4 * costs.blocks[0].forward_flops
        device, dtype = machine.device, self._chain.dtype
        self._chain.move_buffers(device)
        ids = torch.zeros((1, tokens), dtype=torch.int64, device=device)
        resident = (0, _BLOCKS + 1) if self._chain.has_epilogue_unit else (0,)
        for unit in resident:
            self._chain.bind(unit, torch.zeros(self._chain.layouts[unit].num_elements, dtype=dtype, device=device), None)
        with torch.no_grad():
            self._call: Any = self._chain.prologue(MicroBatch(ids, ids)).calls[0]
        elements = self._chain.layouts[1].num_elements
        # Neither zeros, which some hardware multiplies at less power, nor large, so that nothing overflows in 16 bits.
        self._flat = torch.empty(elements, dtype=dtype, device=device).uniform_(-0.02, 0.02)
        self._accumulator = torch.zeros(elements, dtype=torch.float32, device=device)
        self._hidden = torch.empty((1, tokens, hidden_size), dtype=dtype, device=device).uniform_(-1, 1)

    @property
    def flops(self) -> float:
        """Operations of a unit."""
        return self._flops

    def unit(self) -> float:
        """Run the micro-batch once."""
        chain = self._chain
        chain.bind(1, self._flat, None)
        with torch.no_grad():
            chain.block(0, self._hidden, self._call)
        chain.bind(1, self._flat, self._accumulate)
        with torch.enable_grad():
            leaf = self._hidden.detach().requires_grad_()
            out = chain.block(0, leaf, self._call)
            torch.autograd.backward([out.hidden], [self._hidden])
        chain.release(1)
        if self._machine.device.type == "cuda":
            torch.cuda.synchronize(self._machine.device)
        return self._flops

    def _accumulate(self, parameter: ParameterSpec, gradient: torch.Tensor) -> None:
        self._accumulator[parameter.offset : parameter.offset + parameter.num_elements].add_(gradient.reshape(-1))


def fresh_pages_share(load: Load, seconds: float, rounds: int) -> float:
    """Return what `load` keeps of its rate where freed memory is given back to the kernel; it is kept from then on.

    In this order and not in turns: what a heap has kept once is not mapped afresh again, however it is told to.
    """
    rates = []
    for keep in (False, True):
        keep_freed_memory(keep)
        load.unit()
        rates.append(statistics.median(rate_of(load, seconds) for _ in range(rounds)))
    return min(1.0, rates[0] / rates[1])


def _chain(compute_dtype: str, hidden_size: int, tokens: int) -> Chain:
    heads = max(1, hidden_size // _HEAD_WIDTH)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 43 // 16,  # 5504 of 2048, the proportion of Llama
        num_hidden_layers=_BLOCKS,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=_VOCABULARY,
        max_position_embeddings=tokens,
    )
    return Chain.from_config(config, compute_dtype, AdamW())
