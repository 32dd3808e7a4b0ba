"""Calls of operators, which Python's part of a forecast goes by: as many as the model's own code calls, and what they take."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, MixtralConfig

from headrace.machine.cpu import CpuMachine
from headrace.measure.decoding import decoding_seconds, row_product_rate
from headrace.model import Chain
from headrace.model.seats.generation_check import ready_to_generate
from headrace.model.seats.generation_costs import generation_costs
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.clock.rates import Rates
from headrace.terms.costs import CALLS_OF_EXPERT
from headrace.terms.lanes import Lane
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.program import Op, Verb

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls_of_a_token(config: Any) -> int:
    """Return how many operators the first block of a model of transformers calls for one token after a prompt of five."""
    model = AutoModelForCausalLM.from_config(config).eval()
    ready_to_generate(model)
    block, counted = model.model.layers[0], Counted()
    with torch.no_grad():
        cache = DynamicCache(config=config)
        model(input_ids=torch.zeros((1, 5), dtype=torch.int64), past_key_values=cache, use_cache=True)
        own = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with counted:
                return own(*args, **kwargs)

        block.forward = forward
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64), past_key_values=cache, use_cache=True)
    return counted.calls


def test_a_plan_counts_the_calls_of_the_models_own_code() -> None:
    config = LlamaConfig(**SIZES)
    chain = Chain.from_config(config, "float32", Optimizer())
    ready_to_generate(chain.model)
    found = generation_costs(chain, 1, 5)
    own = calls_of_a_token(config)
    # On shapes alone a mask cannot be seen to hide nothing: it is made fit for attention, by four calls.
    assert found.next.calls == (own + 4,) * 2


def test_each_expert_that_is_wanted_takes_so_many() -> None:
    two, four = (MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=choices) for choices in (2, 4))
    assert calls_of_a_token(four) - calls_of_a_token(two) == 2 * CALLS_OF_EXPERT


def test_python_comes_before_a_processor_computes_and_beside_a_device() -> None:
    op = Op(index=0, verb=Verb.FORWARD, lane=Lane.COMPUTE, bytes=10**6, flops=1e6, calls=100)
    plain = replace(op, calls=0)
    here = replace(nominal_machine(2, host_bytes=1 << 30, device_bytes=None), operator_seconds=1e-5, launch_seconds=0.0)
    rates = Rates(here, "bfloat16", 2, None)
    assert rates.alone_seconds(op) == pytest.approx(rates.alone_seconds(plain) + 1e-3)
    turn = replace(plain, verb=Verb.TURN)
    assert rates.alone_seconds(turn) == pytest.approx(rates.alone_seconds(plain) + here.turn_seconds)
    card = replace(load_profile("rtx4090-1ssd"), operator_seconds=1e-5, launch_seconds=0.0)
    assert Rates(card, "bfloat16", None, None).alone_seconds(op) == pytest.approx(1e-3)
    busy = replace(op, flops=1e13)
    assert Rates(card, "bfloat16", None, None).alone_seconds(busy) == Rates(card, "bfloat16", None, None).alone_seconds(
        replace(busy, calls=0)
    )


def test_what_python_takes_is_measured() -> None:
    operator, turn = decoding_seconds(CpuMachine())
    assert 0 < operator < turn


# Measured seconds of a token of one row on two cores: bytes of blocks and head, operators, seconds (generation-forecast).
MEASURED = {"SmolLM2": (269_000_000, 2400, 0.055), "1.35 B": (2_700_000_000, 1924, 0.19)}


@pytest.mark.parametrize("name", MEASURED)
def test_a_machine_without_a_profile_is_not_taken_to_be_faster_than_one_was(name: str) -> None:
    num_bytes, calls, measured = MEASURED[name]
    nominal = nominal_machine(2, host_bytes=1 << 34, device_bytes=None)
    found = Rates(nominal, "bfloat16", 2, None).compute_seconds(num_bytes, num_bytes, calls) + nominal.turn_seconds
    assert found == pytest.approx(measured, rel=0.3)


def test_a_machine_without_a_profile_goes_through_weights_with_all_cores() -> None:
    """Up to what memory gives; where it has no products of bfloat16, plans count what widening takes."""
    one, two, many = (nominal_machine(cores, host_bytes=1 << 34, device_bytes=None) for cores in (1, 2, 64))
    rates = [Rates(each, "bfloat16", each.cores, None).memory_bytes_per_second for each in (one, two, many)]
    assert rates == [pytest.approx(rates[0]), pytest.approx(2 * rates[0]), many.host_memory_bytes_per_second]
    widening = nominal_machine(2, host_bytes=1 << 34, device_bytes=None, widens=True)
    assert Rates(widening, "bfloat16", 2, None).memory_bytes_per_second == widening.host_memory_bytes_per_second


def test_weights_come_for_a_row_as_fast_as_was_measured() -> None:
    here = nominal_machine(2, host_bytes=1 << 30, device_bytes=None)
    op = Op(index=0, verb=Verb.FORWARD, lane=Lane.COMPUTE, bytes=10**9)
    here = replace(here, row_product_bytes_per_second=None)
    slower = replace(here, row_product_bytes_per_second=here.host_memory_bytes_per_second / 3)
    alone = [Rates(machine, "bfloat16", 2, None).alone_seconds(op) - here.launch_seconds for machine in (here, slower)]
    assert alone[1] == pytest.approx(3 * alone[0])
    rate, multiplies = row_product_rate(CpuMachine()), CpuMachine().multiplies("bfloat16")
    assert (rate is not None and rate > 0) if multiplies else rate is None
