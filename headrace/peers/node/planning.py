"""Workers and a node: does it fit on both sides, how fast, what limits it, and what to buy next.

Invariant: the worker's placement is `make_plan`'s and the node's is `serving_plan`'s, as in a run. Times are the simulator's
for both programs on one virtual clock. Nothing else is estimated.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.ask.answer import DEFAULT_STEPS, ShapesToTrain, machine_of, rows_of_each, step_lengths_of
from headrace.ask.model_config import read_parts
from headrace.ask.place import RunPlace, multiplies
from headrace.ask.question import ModelToPlan, Question
from headrace.files import default_ssd_bytes, file_systems
from headrace.model import Profiles
from headrace.peers.node.cluster import Cluster, ClusterForecast, forecast_cluster
from headrace.peers.node.report import ClusterReport, ElasticReport, Purchase
from headrace.plan.clock.endurance import endurance
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.forecast.footprint import with_footprint
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import make_plan
from headrace.plan.search.serving import serving_plan
from headrace.plan.value.plan import Plan
from headrace.terms.errors import PlanInfeasible
from headrace.terms.forms import Form, in_place_forms
from headrace.terms.layout import realigned
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import Budget
from headrace.terms.options.muster import Muster
from headrace.terms.options.plan_options import PlanOptions
from headrace.update.combinations import refuse_combination

# Bytes per second of a network without a given rate: 10 Gbit/s.
_LINK_BYTES_PER_SECOND = 1.25e9
# Forecasts that are only compared with one another may be coarse.
_COARSE_OPERATIONS = 1600


def plan_workers(model: str | Path, options: PlanOptions, *, here: bool = False) -> ClusterReport | ElasticReport:
    """Plan the training of `model` by the workers of `options`, whose number may be MIN:MAX. Raises as `plan_cluster`."""
    assert options.workers is not None, "asked for"
    muster = Muster.of(options.workers)
    most = plan_cluster(model, replace(options, workers=muster.most), here=here)
    if not muster.is_elastic:
        return most
    return ElasticReport(most=most, least=plan_cluster(model, replace(options, workers=muster.least), here=here))


def plan_cluster(model: str | Path, options: PlanOptions, *, here: bool = False) -> ClusterReport:
    """Plan the training of `model` by `options.workers` workers and a node that holds weights and states.

    `options.machine` is a worker; host and device memory and `ssd` (for block inputs) belong to each worker. `here` says that a
    worker is this machine. `tokens_per_step` counts the tokens of all workers.

    Raises:
        ModelError: there is no configuration, or its architecture is one that training refuses.
        InputError: lengths, budgets or numbers are impossible.
    """
    worker, workers = machine_of(options, "workers"), int(options.workers or 0)
    node = _node(options)
    config, whole = read_parts(model)
    tokens, length = step_lengths_of(config, options)
    rows = rows_of_each(tokens, length, workers, "workers")
    refuse_combination(options, at_node=True)
    shapes = ShapesToTrain.of(config, whole, options)
    chain = shapes.chain
    if not multiplies(options.compute_dtype, worker, here=here) and not worker.has_device:
        chain.multiply_wide()
    cluster = Cluster.of(
        worker,
        node,
        workers=workers,
        nodes=options.nodes,
        link_bytes_per_second=float(options.link or _LINK_BYTES_PER_SECOND),
        widening=1.0 if (options.gradient_dtype or options.compute_dtype) == "float32" else 2.0,
    )
    report = ClusterReport(
        **shapes.asked,
        workers=workers,
        nodes=options.nodes,
        node_ssds=len(node.drives),
        worker_machine=worker.name,
        node_machine=node.name,
        link_bytes_per_second=cluster.worker.network_bytes_per_second,
    )
    plans = _Plans(shapes, options, cluster, worker_tokens=rows * length, here=here)
    try:
        planned = plans.worker(), plans.node()
    except PlanInfeasible as error:
        return replace(report, reason=str(error))
    found = forecast_cluster(*planned, cluster, tokens_per_step=tokens)
    written, seconds = found.ssd_bytes_written_per_step, found.step_seconds
    return replace(
        report,
        worker_plan=planned[0],
        node_plan=planned[1],
        forecast=found,
        purchases=tuple(sorted(plans.purchases(*planned), key=lambda each: -each.gain)),
        endurance=endurance(
            cluster.all_nodes.drives, written, num_steps=options.max_steps or DEFAULT_STEPS, step_seconds=seconds
        ),
    )


def _node(options: PlanOptions) -> Ceilings:
    """Return one node: it has the profile's first drive, as many times as asked for."""
    named = options.node_machine
    profile = load_profile(named) if isinstance(named, str) else named
    return replace(profile, drives=profile.drives[:1] * options.node_ssds)


class _Plans:
    """The plans of a worker and of a node for one model."""

    def __init__(
        self, shapes: ShapesToTrain, options: PlanOptions, cluster: Cluster, *, worker_tokens: int, here: bool
    ) -> None:
        self._chain, self._options, self._cluster, self._here = shapes.chain, options, cluster, here
        self._tokens, self._length = shapes.lengths["tokens_per_step"], shapes.lengths["sequence_length"]
        self._worker_tokens, self._rule = worker_tokens, shapes.rule
        profiles = Profiles(self._chain, for_gpu=cluster.worker.has_device, huge_pages=None if here else True)
        self._costs = partial(profiles.of, length=self._length)
        layouts = [realigned(layout, self._rule.parameter_alignment) for layout in self._chain.layouts]
        self._forms = in_place_forms(layouts, self._chain.num_blocks, self._rule)

    def worker(self) -> Plan:
        """Return a worker's plan: all units are far, and no gradient is held until the norm is known, which the node does.

        Raises:
            PlanInfeasible: its memory is too small.
        """
        return make_plan(self._worker_problem(self._worker_tokens), self._cluster.worker)

    def node(self) -> Plan:
        """Return the plan of the nodes, as one machine.

        Raises:
            PlanInfeasible: their memory or SSDs are too small.
        """
        node = self._cluster.all_nodes
        place = replace(RunPlace.of(node, here=False), device_bytes=None, device_overhead_bytes=0)
        allowance = place.allowance(Budget(), ssd_bytes=default_ssd_bytes(node, ()), import_workspace_bytes=None)
        question = Question.of(self._options, allowance, tokens_per_step=self._tokens, sequence_length=self._length)
        try:
            return serving_plan(question.problem(self._model(self._forms), self._costs), node)
        except PlanInfeasible as error:
            error.args = (f"the node: {error}", *error.args[1:])
            raise

    def _worker_problem(self, tokens: int) -> Problem:
        cluster, options = self._cluster, self._options
        worker, ssd = cluster.worker, options.budget.ssd
        drives = worker.of_directories(file_systems(ssd)) if ssd else worker
        named = isinstance(options.machine, str) and not options.machine.endswith("ssd")
        place = RunPlace.of(worker, here=self._here)
        allowance = place.allowance(
            options.budget,
            # Without an SSD of its own, a worker's block inputs stay in memory.
            ssd_bytes=0 if named and not ssd else default_ssd_bytes(drives, ssd),
            import_workspace_bytes=None,
        )
        question = Question.of(options, allowance, tokens_per_step=tokens, sequence_length=self._length)
        question = replace(question, workload=replace(question.workload, clip=False))
        if cluster.network.workers > 1:  # gradients are rounded after they are added, not before
            question = replace(question, gradient_dtype="float32")
        forms = tuple(replace(form, is_far=True) for form in self._forms)
        return question.problem(self._model(forms), self._costs)

    def _model(self, forms: tuple[Form, ...]) -> ModelToPlan:
        return ModelToPlan(chain=self._chain, forms=forms, rule=self._rule, by_parts=False)

    def purchases(self, worker: Plan, node: Plan) -> Iterator[Purchase]:
        """Yield what one could buy, with the gain of each: its tokens per second relative to those of now."""
        cluster, tokens = self._cluster, self._tokens
        now = forecast_cluster(worker, node, cluster, tokens_per_step=tokens, most_operations=_COARSE_OPERATIONS)
        bigger = {
            "drives": ("twice as many SSDs in each node", cluster.with_drives(2)),
            "nodes": ("twice as many nodes", cluster.with_nodes(2)),
            "links": ("links twice as fast", cluster.with_links(2)),
            "cores": ("twice the CPU cores and memory bandwidth in each node", cluster.with_cores(2)),
        }
        for name, (words, other) in bigger.items():
            yield self._purchase(name, words, now, worker, node, other, tokens)
        more = self._with_twice_the_tokens(worker)
        if more is not None:
            yield self._purchase("tokens", "twice as many tokens a step", now, more, node, cluster, 2 * tokens)

    def _purchase(
        self, name: str, words: str, now: ClusterForecast, worker: Plan, node: Plan, cluster: Cluster, tokens: int
    ) -> Purchase:
        found = forecast_cluster(worker, node, cluster, tokens_per_step=tokens, most_operations=_COARSE_OPERATIONS)
        return Purchase(name=name, change=words, gain=found.tokens_per_second / now.tokens_per_second)

    def _with_twice_the_tokens(self, worker: Plan) -> Plan | None:
        """Return the worker's plan for twice the tokens with the same placement; None where that does not fit."""
        tokens = 2 * self._worker_tokens
        problem = self._worker_problem(tokens)
        twice = replace(worker.batch, tokens_per_step=tokens, num_micro_batches=2 * worker.batch.num_micro_batches)
        plan = replace(worker, batch=twice).with_gradients(accumulate=True)
        plan = with_footprint(plan, problem.costs_of(plan.batch.micro_batch_sequences), problem.allowance)
        if plan.fits:
            return plan
        try:
            return make_plan(problem, self._cluster.worker)
        except PlanInfeasible:
            return None
