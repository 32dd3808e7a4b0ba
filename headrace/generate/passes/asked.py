"""The plan of a generation that `headrace plan --generate` is asked for, here or on another machine: no weight is needed.

Invariant: it is what `headrace generate` runs, by the same planner.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from headrace.ask.model_config import open_coded, read_parts
from headrace.ask.place import RunPlace, multiplies
from headrace.generate.passes.faster_ways import ways_that_fit, with_faster_ways
from headrace.generate.passes.planner import GenerationPlanner
from headrace.generate.passes.units import plain_and_coded
from headrace.generate.plan.block_tables import without_embedding, without_tables
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.plan.plan_notes import beside_plain, of_copying
from headrace.model import Chain, Checkpoint, WeightMap
from headrace.model.by_rows.embedding_rows import take_back
from headrace.model.seats.generation_check import check_generation, ready_to_generate
from headrace.terms.errors import PlanInfeasible
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.optimizer import Optimizer


class Asked(TypedDict):
    """What is to be generated: prompts of up to `prompt_length` tokens, with up to `new_tokens` for each."""

    prompts: int
    prompt_length: int
    new_tokens: int


def plan_generation(
    model: str,
    options: GenerateOptions,
    ceilings: Ceilings | None,
    *,
    here: bool,
    compress: str | None = None,
    say_instead: bool = False,
    **asked: Unpack[Asked],
) -> GenerationPlan:
    """Return the plan for generating with `model` (a directory, a config.json, or OWNER/NAME on the Hub): no weight is needed.

    For a directory with coded weights, the headers of its files are read. With `compress` the plan is for the model that
    compression to that code would write. Either says what a plan for the weights in the compute dtype would take, too.

    `ceilings` is the machine, None for a nominal one of this size; `here` says that it is this machine. With `say_instead`
    the plan, or the refusal, names changes that would be faster, or fit.

    Raises:
        InputError: the model, its architecture or a number cannot be used.
        PlanInfeasible: a budget is too small.
    """
    case = _Case.of(model, options, ceilings, here=here, compress=compress, asked=asked)
    try:
        plan = case.planned()
    except PlanInfeasible as error:
        if say_instead:
            error.args = (f"{error}{ways_that_fit(options, case.planned, is_coded=case.is_coded)}", *error.args[1:])
        raise
    if case.checkpoint is not None:
        plan = replace(plan, unused_tensors=case.chain.unused_tensors)
    by_rows = case.by_rows
    if case.is_coded:
        plan = beside_plain(compress, plan, case.planned_plain, ceilings)
    if say_instead:
        plan = with_faster_ways(plan, options, case.planned, is_coded=case.is_coded)
    return plan.with_notes(by_rows).with_notes(of_copying(plan, case.options, ceilings, Path(model), here=here))


@dataclass
class _Case:
    """A model to generate with, and where: what plans of it with other options share. `by_rows` are notes on tables."""

    chain: Chain
    checkpoint: Checkpoint | None
    weights: WeightMap | None
    place: RunPlace
    options: GenerateOptions
    compress: str | None
    on_cpu: bool
    asked: Asked
    by_rows: tuple[str, ...]

    @classmethod
    def of(
        cls,
        model: str,
        options: GenerateOptions,
        ceilings: Ceilings | None,
        *,
        here: bool,
        compress: str | None,
        asked: Asked,
    ) -> "_Case":
        """Raises: as `plan_generation`."""
        chain, checkpoint = _described(model, options.compute_dtype, compress)
        place = RunPlace.of(ceilings, here=here)
        on_cpu = place.device_bytes is None and options.device_memory is None
        if on_cpu and not multiplies(chain.compute_dtype, ceilings, here=here):
            chain.multiply_wide()
        weights = None if checkpoint is None else chain.attach(checkpoint)
        without_tables(chain, weights, place, options.budget)
        by_rows = without_embedding(chain, weights, place, options.budget)
        options = replace(options, machine=ceilings)
        if not here:  # another machine's instructions are not known
            options = replace(options, packed_products=False, narrow_products=False)
        return cls(chain, checkpoint, weights, place, options, compress, on_cpu, asked, by_rows)

    @property
    def is_coded(self) -> bool:
        """Whether weights are coded, or are to be."""
        return self.checkpoint is not None or self.compress is not None

    def planned(self, rows: int | None = None, compress: str | None = None, **changes: Any) -> GenerationPlan:
        """Return the plan with `rows` to a seat, where the options say nothing of them, other weights or other options.

        More host memory may take the embedding back for all later plans. Raises: as `GenerationPlanner.plan`.
        """
        place, options = self.place, replace(self.options, **changes)
        if "host_memory" in changes:
            place = place.with_twice_host()
            if take_back(self.chain):
                without_embedding(self.chain, self.weights, place, options.budget)
        plain, coded = plain_and_coded(self.chain, self.checkpoint, compress or self.compress, on_cpu=self.on_cpu)
        return GenerationPlanner(self.chain, coded or plain, place, options).plan(**self.asked, rows=rows)

    def planned_plain(self) -> GenerationPlan:
        """Return the plan with weights in the compute dtype."""
        plain, _ = plain_and_coded(self.chain, None, None, on_cpu=self.on_cpu)
        return GenerationPlanner(self.chain, plain, self.place, self.options).plan(**self.asked)


def _described(model: str, dtype: str | None, compress: str | None) -> tuple[Chain, Checkpoint | None]:
    """Return the chain that a model's configuration describes, in `dtype` or its own; and its files where they are coded."""
    config, _ = read_parts(model)
    checkpoint = None
    if getattr(config, "quantization_config", None) is not None:
        checkpoint = open_coded(model, compress)
        config = checkpoint.config
    check_generation(config)
    own = checkpoint.main_dtype if checkpoint else str(getattr(config, "dtype", None) or "bfloat16")
    chain = Chain.from_config(config, dtype or own.removeprefix("torch."), Optimizer())
    ready_to_generate(chain.model)
    return chain, checkpoint
