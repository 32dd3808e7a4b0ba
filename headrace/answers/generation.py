"""What is asked when a generation is planned, here or on another machine: one builder of questions, as `question.py` for steps.

Invariant: what `headrace plan --generate` answers is what `headrace generate` runs.
"""

import gc
from collections.abc import Callable
from functools import cache

from headrace.answers.question import Place, runtime_bytes
from headrace.flow.sources import WeightSource
from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.limits import default_host_bytes, machine_memory_bytes
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.generation_costs import generation_costs
from headrace.plan.footprint import Allowance
from headrace.plan.generation import GenerationPlan
from headrace.plan.generation_search import GenerationQuestion, make_generation_plan
from headrace.terms.budget import Budget, default_bytes
from headrace.terms.ceilings import Ceilings
from headrace.terms.costs import GenerationCosts


class GenerationPlanner:
    """Plans generations of `chain`, which is ready for them, from `source`, on `machine` within `budget`."""

    def __init__(
        self,
        chain: Chain,
        source: WeightSource,
        machine: Machine,
        budget: Budget,
        *,
        cores: int,
        ceilings: Ceilings | None,
        rows: int | None = None,
        seats: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._chain, self._source, self._machine, self._budget = chain, source, machine, budget
        self._cores, self._ceilings, self._rows, self._seats, self._notes = cores, ceilings, rows, seats, notes
        self._costs = cache(lambda rows, length: generation_costs(chain, rows, length))

    def plan(self, prompts: int, prompt_length: int, new_tokens: int) -> GenerationPlan:
        """Return the plan for so many prompts of up to `prompt_length` tokens, and up to `new_tokens` of each.

        Raises:
            PlanInfeasible: a budget is too small.
            ConfigError: a budget is more than there is.
        """

        def costs_of(rows: int) -> GenerationCosts:
            return self._costs(rows, prompt_length)

        question = GenerationQuestion(
            units=self._source.figures,
            num_blocks=self._chain.num_blocks,
            compute_dtype=self._chain.compute_dtype,
            separate_device=self._machine.separate_device,
            costs_of=costs_of,
            prompts=prompts,
            prompt_length=prompt_length,
            new_tokens=new_tokens,
            allowance=self._allowance(lambda: costs_of(1)),
            ceilings=self._ceilings,
            rows=self._rows,
            seats=self._seats,
        )
        plan = make_generation_plan(question)
        return plan.with_notes((*self._notes, *self._chain.notes))

    def _allowance(self, warm_up: Callable[[], object]) -> Allowance:
        separate = self._machine.separate_device
        warm_up()
        gc.collect()
        place = Place(
            name="this machine",
            host_bytes=default_host_bytes(pins=self._machine.device.type == "cuda"),
            device_bytes=default_bytes("device", self._machine.device_memory_bytes()[0]) if separate else None,
            device_overhead_bytes=self._machine.device_overhead_bytes,
            runtime_bytes=runtime_bytes(anonymous_bytes()),
            cores=self._cores,
            most_bytes={"host": machine_memory_bytes()},
        )
        return place.allowance(self._budget, ssd_bytes=None, import_workspace_bytes=None)
