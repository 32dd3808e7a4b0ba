"""Plans for one model under several questions, and variants of a plan that do better.

Invariant: a placement is `make_plan`'s and times are the simulator's, as for a run.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

from headrace.ask.plan_report import Alternative
from headrace.ask.question import ModelToPlan, Question
from headrace.ask.variants import Variant, other_rules, other_wires, smaller_states
from headrace.flow.weights.parted_base import ExpertUnits, refuse_dense, refuse_trained_parts
from headrace.model import Chain, Profiles, WeightMap, import_workspace_bytes
from headrace.model.adapters.adapters import Adapters
from headrace.model.by_rows.block_tables import block_tables_of, by_rows, is_large, take_as, take_tables, trained_tables_of
from headrace.model.by_rows.embedding_rows import embedding_rows_of, has_own_head
from headrace.model.streams.block_parts import block_parts
from headrace.model.streams.stored_experts import NotStoredSingly
from headrace.plan.forecast.footprint import with_footprint
from headrace.plan.forecast.forecast import Forecast, StepSeconds
from headrace.plan.schedules.ranks import ranks_on
from headrace.plan.search.given import adopted
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import holds_states, make_plan, nominal_ceilings
from headrace.plan.search.space import THRIFTS, filled, placements_of, plan_of
from headrace.plan.value.expert_plan import note_on_parts
from headrace.plan.value.plan import Plan
from headrace.plan.value.refusal import least_of, with_whole_blocks
from headrace.terms.block_parts import no_parts
from headrace.terms.costs import ModelCosts
from headrace.terms.embedding_rows import note_on_learned_rows
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.forms import Form
from headrace.terms.lanes import Lane
from headrace.terms.layout import realigned
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import GIB, MIB, format_bytes, round_up
from headrace.update import rule_of
from headrace.update.wires import DenseWire
from headrace.update.wires.forms import Coding, forms_under
from headrace.update.wires.rows import BLOCKS, RowsWire, rows_in_place_of
from headrace.update.wires.stored_codes import StoredCodes, stored_codes
from headrace.update.wires.wire import Wire

# Forecasts that are only compared with one another may be coarse.
COARSE_OPERATIONS = 1000
# They are finer for times that stand beside the plan's own.
_MOST_OPERATIONS = 2000
# A variant of a plan that fits is worth a line if it takes less than this share of the plan's time.
_WORTH_IT = 0.99
# Steps between two commits in the variant with few commits.
_SELDOM = 10
# How many placements of a variant are compared.
_MOST_PLACEMENTS = 4


class ModelPlans:
    """Plans for one model, whose costs are profiled once for each micro-batch."""

    def __init__(
        self,
        chain: Chain,
        stored: StoredCodes,
        question: Question,
        ceilings: Ceilings | None,
        *,
        here: bool,
        weights: WeightMap | None = None,
        parted: ExpertUnits | None = None,
        like: ModelCosts | None = None,
    ) -> None:
        self._chain, self._stored, self._weights, self._here = chain, stored, weights, here
        self._layouts = (parted.kept(chain) if parted else chain).layouts
        self._experts = parted.experts if parted else None
        self._embedding, self._own_head = embedding_rows_of(chain, weights), has_own_head(chain)
        for_gpu = question.allowance.device_overhead_bytes > 0
        # Elsewhere, too, tensors will be allocated as the command tells the library, whatever this process was told.
        huge_pages = None if here or ceilings is None else True
        self._new_profiles = partial(Profiles, chain, for_gpu=for_gpu, huge_pages=huge_pages, other=like)
        self._profiles: dict[str, Profiles] = {}  # by the adapters that blocks compute with
        self._measured = ceilings
        # They only serve times: the choice depends on whether anybody measured, as it does in a run.
        self.ceilings = ceilings or nominal_ceilings(self._problem(question))
        self._seconds_of = StepSeconds(self.ceilings)

    def chosen(self, question: Question) -> Question:
        """Return the question with one of the wires that its own leaves open."""
        choices = question.wire.choices(self._chain.layouts[1 : self._chain.num_blocks + 1])
        questions = [replace(question, wire=choice) for choice in choices]
        return next((each for each in questions[:-1] if holds_states(self._problem(each))), questions[-1])

    def plan(self, question: Question, given: Plan | None = None) -> Plan:
        """Return the plan for `question`; a `given` one is followed, as a run does.

        Raises:
            ConfigError: the given plan is for another run.
            PlanInfeasible: memory or SSD space is too small.
        """
        if given:
            return adopted(given, self._problem(self.answered(question, given)))
        try:
            return make_plan(self._problem(question), self._measured, self._seconds_of)
        except PlanInfeasible as refusal:
            if self._experts is not None:
                raise
            if found := self._by_tables(question):
                return found[0].plan(found[1])
            try:
                plans, parted = self._parted(question)
            except NotStoredSingly as why:
                words = str(why)
            else:
                return plans.plan(parted).with_notes((note_on_parts(refusal.tier, refusal.needed_bytes),))
            return self._plan_by_rows(question, refusal, words)

    def _plan_by_rows(self, question: Question, refusal: PlanInfeasible, words: str) -> Plan:
        """Return the plan that trains the embedding by rows, where the whole was refused. `words`: see `with_whole_blocks`."""
        refused = with_whole_blocks(refusal, words)
        if refused.tier == "ssd":
            raise refused
        try:
            question = self._by_rows(question)
        except ConfigError:
            raise refused from None
        try:
            plan = make_plan(self._problem(question), self._measured, self._seconds_of)
        except PlanInfeasible as least:
            raise least_of(refused, with_whole_blocks(least, words)) from None
        return plan.with_notes((note_on_learned_rows(refused.tier, refused.needed_bytes),))

    def answered(self, question: Question, plan: Plan) -> Question:
        """Return the question that `plan` answers: that for `question` may train the embedding by rows."""
        learns = plan.embedding is not None and plan.embedding.learns
        return self._by_rows(question) if learns and self.forms(question)[0].table is None else question

    def _by_rows(self, question: Question) -> Question:
        """Return the question with an embedding that is trained by rows.

        Raises:
            ConfigError: that is not possible.
        """
        if question.place is not None or self._several or self._embedding is None:
            raise ConfigError("gradient: rows: the embedding is no plain table, or several machines train; give dense")
        wire = rows_in_place_of(question.wire, self._chain, question.optimizer, question.workload.gradient_sum)
        return replace(question, wire=wire)

    @property
    def _several(self) -> bool:
        """Whether ranks share the run."""
        return self._measured is not None and ranks_on(self._measured) > 1

    def _parted(self, question: Question) -> "tuple[ModelPlans, Question]":
        """Return plans with experts as parts, and the question for them.

        Raises:
            NotStoredSingly: they cannot be; the message says why.
        """
        refuse_dense(self._chain)
        wire = question.wire.of(self._chain)
        beside = isinstance(wire.adapters, Adapters)
        if question.place is not None:
            raise NotStoredSingly("several machines take whole blocks")
        if not (beside or isinstance(wire, DenseWire | RowsWire)):
            raise NotStoredSingly(f"{wire.name} takes whole blocks")
        chain = self._another_chain(question)
        take_as(self._chain, chain, self._weights)
        if beside:
            on_cpu = not question.allowance.device_overhead_bytes
            base = ExpertUnits.frozen(chain, self._weights, on_cpu=on_cpu)
        else:
            refuse_trained_parts(self.forms(question), question.workload.gradient_sum)
            base = ExpertUnits.trained(chain, separate=question.allowance.device_bytes is not None)
        base.install(chain)
        return self._plans_of(chain, replace(question, wire=wire), base)

    def _by_tables(self, question: Question) -> "tuple[ModelPlans, Question] | None":
        """Return plans with all tables in blocks read by rows, and the question for them; None where none is in a block still
        that need not be.
        """
        if question.place is not None or (not (beside := question.wire.is_beside) and self._several):
            return None
        chain = self._another_chain(question)
        found = (block_tables_of if beside else trained_tables_of)(chain, self._weights)
        if len(found) == len(by_rows(self._chain)):
            return None
        if not beside:
            try:
                wire = rows_in_place_of(question.wire, chain, question.optimizer, question.workload.gradient_sum, BLOCKS)
            except ConfigError:
                return None
            question = replace(question, wire=wire)
        take_tables(chain, found)
        return self._plans_of(chain, question, None)

    def _another_chain(self, question: Question) -> Chain:
        """Return another chain of the model: what is made parts of one stays so."""
        known, optimizer = self._chain, question.optimizer
        alignment = rule_of(optimizer, known.compute_dtype).figures.parameter_alignment
        chain = Chain.from_config(known.config, known.compute_dtype, optimizer, alignment)
        chain.take_head_by(known.head_rows)
        if known.wide_products:
            chain.multiply_wide()
        return chain

    def _plans_of(self, chain: Chain, question: Question, base: ExpertUnits | None) -> "tuple[ModelPlans, Question]":
        """Return plans for another chain, whose experts may be parts, and the question for them."""
        importing = import_workspace_bytes((base.kept(chain) if base else chain).layouts)
        question = replace(question, allowance=replace(question.allowance, import_workspace_bytes=importing))
        planes = rule_of(question.optimizer, chain.compute_dtype).figures.planes
        stored = stored_codes(chain, self._weights, planes) if self._weights else StoredCodes()
        like = next((profiles.any for profiles in self._profiles.values()), None)  # the head is the same
        weights = None if base else self._weights
        more: dict[str, Any] = {"here": self._here, "weights": weights, "parted": base, "like": like}
        return ModelPlans(chain, stored, question, self._measured, **more), question

    def forecast(self, plan: Plan) -> Forecast:
        """Return the forecast of a plan on the machine for which it was made."""
        return self._seconds_of.forecast(plan)

    def quick_plan(self, question: Question) -> Plan:
        """Return a plan for `question` without searching for what to replay: one that fits, not the fastest.

        Raises:
            PlanInfeasible: memory or SSD space is too small.
        """
        if any(map(is_large, block_tables_of(self._chain, self._weights))) and (found := self._by_tables(question)):
            return found[0].quick_plan(found[1])
        problem = self._problem(question)
        policy = problem.policies[0]
        choices = (choice for thrift in THRIFTS for choice in placements_of(problem, policy, thrift))
        fitting = (plan for plan in (plan_of(problem, choice) for choice in choices) if plan.fits)
        chosen = [filled(problem, plan) for plan in islice(fitting, _MOST_PLACEMENTS)]
        if not chosen:
            return self.plan(question)  # this says why nothing fits
        return min(chosen, key=lambda plan: self._seconds_of(plan, COARSE_OPERATIONS)) if len(chosen) > 1 else chosen[0]

    def placed_like(self, plan: Plan, question: Question) -> Plan:
        """Return the `plan` of a stage for another one, which is like it but for the groups in flight."""
        problem = self._problem(question)
        assert problem.place is not None, "the question of a stage"
        assert plan.stage is not None, "the plan of a stage"
        choices = problem.place.choices(plan.batch.num_micro_batches)
        plan = replace(plan, stage=replace(choices, sums=plan.stage.sums))
        return with_footprint(plan, problem.costs_of(plan.batch.micro_batch_sequences), problem.allowance)

    def block_flops(self, question: Question) -> list[float]:
        """Return the operations of each block's forward on a row, with those behind the blocks at the last."""
        costs = self._problem(question).costs_of(1)
        work = [block.forward_flops for block in costs.blocks]
        work[-1] += costs.epilogue_flops_per_token * costs.length
        return work

    def forms(self, question: Question) -> tuple[Form, ...]:
        """Return the forms of the model's units."""
        rule = rule_of(question.optimizer, self._chain.compute_dtype).figures
        layouts = [realigned(layout, rule.parameter_alignment) for layout in self._layouts]
        wire = question.wire.of(self._chain)
        coding = Coding(stored=self._stored, on_host=not question.allowance.device_overhead_bytes)
        return forms_under(layouts, self._chain.num_blocks, wire, rule, question.optimizer, coding)

    def _costs(self, wire: Wire, sequences: int, length: int) -> ModelCosts:
        """Return what micro-batches cost; if `wire` is one of adapters, blocks compute with them."""
        adapters = wire.of(self._chain).adapters
        profiles = self._profiles.setdefault(wire.name if adapters else "", self._new_profiles())
        with self._chain.adapted(adapters):
            return profiles.of(sequences, length)

    def _problem(self, question: Question) -> Problem:
        rule, forms = rule_of(question.optimizer, self._chain.compute_dtype).figures, self.forms(question)
        own = (
            rule_of(question.optimizer, "float32").figures if any(form.has_own_family or form.table for form in forms) else None
        )
        if own:
            question.wire.refuse(question.optimizer)
        alone = self._experts is None and question.place is None and question.allowance.device_bytes is not None
        cuts = partial(block_parts, self._chain, forms) if alone else no_parts
        # A search asks again and again, and to find what adapters are beside takes longer than a plan.
        costs_of = cache(partial(self._costs, question.wire, length=question.workload.sequence_length))
        model = ModelToPlan(
            chain=self._chain,
            forms=forms,
            rule=rule,
            own_rule=own,
            experts=self._experts,
            embedding=self._embedding,
            own_head=self._own_head,
            cuts=cuts,
        )
        return question.problem(model, costs_of)

    def with_fewer_checkpoints(self, question: Question, plan: Plan, found: Forecast | None) -> tuple[Alternative, ...]:
        """Return the variant of a plan with few commits, if it is faster. Commits write the states that live in memory. A step
        whose updates wait may have such states.
        """
        if found is None or plan.updates.checkpoint_every > 1:
            return ()
        problem, every = self._problem(question), plan.updated_units
        costs = problem.costs_of(plan.batch.micro_batch_sequences)
        best: Alternative | None = None
        for held in ("host", "ssd"):
            bare = plan.with_results(speculation=None)
            waiting = bare.with_updates(policy="deferred", late_units=every, checkpoint_every=_SELDOM, resident_states=())
            least = min(plan.num_blocks, max(2, plan.prefetch + 1))
            waiting = replace(waiting.with_gradients(held=held), host_slots=least)
            waiting = with_footprint(waiting, costs, problem.allowance)
            if not waiting.fits:
                continue
            full = filled(problem, waiting)
            times = found.step_seconds / self._seconds_of(full, _MOST_OPERATIONS)
            words = f"lose at most {_SELDOM} steps at a crash, {plain_figure(times)} times as fast"
            options = {"checkpoint_every": _SELDOM}
            made = self.alternative(words, options, full, most_operations=_MOST_OPERATIONS)
            if best is None or made.step_seconds < best.step_seconds:
                best = made
        return () if best is None or best.step_seconds >= _WORTH_IT * found.step_seconds else (best,)

    def sparing_the_ssd(self, question: Question, plan: Plan, found: Forecast | None) -> tuple[Alternative, ...]:
        """Return those variants of a plan that move fewer bytes over the SSDs, which limit its step, if they are faster.

        The plan stays as it is but for one change: weights that stay in host memory, or smaller states. If subspaces are
        trained in place of whole matrices, or by another rule, it is another plan.
        """
        if found is None or found.bottleneck not in (Lane.SSD_READ, Lane.SSD_WRITE):
            return ()
        variants = [*self._weights_in_host_memory(question, plan), *self._smaller_states(question, plan)]
        for words, options, other in (*other_wires(question), *other_rules(question)):
            with suppress(PlanInfeasible, ConfigError):  # some ways cannot train this model
                variants.append((words, options, self.quick_plan(other)))
        made = (self.alternative(*variant, most_operations=_MOST_OPERATIONS) for variant in variants)
        return tuple(each for each in made if each.step_seconds < _WORTH_IT * found.step_seconds)

    def _weights_in_host_memory(self, question: Question, plan: Plan) -> Iterator[Variant]:
        if plan.host_slots < plan.num_blocks:
            problem = self._problem(question)
            roomy = with_footprint(
                replace(plan, host_slots=plan.num_blocks), problem.costs_of(plan.batch.micro_batch_sequences), problem.allowance
            )
            needed_bytes = round_up(roomy.peak("host"), GIB if roomy.peak("host") > 4 * GIB else MIB)
            if not question.may_ask_for("host", needed_bytes):
                return
            yield f"all weights in host memory, {format_bytes(needed_bytes)} of it", {"host_memory": needed_bytes}, roomy

    def _smaller_states(self, question: Question, plan: Plan) -> Iterator[Variant]:
        for change, options, other in smaller_states(question):
            problem = self._problem(other)
            changed = replace(plan, rule=problem.rule, own_rule=problem.own_rule, units=problem.units)
            changed = changed.with_updates(resident_states=())
            changed = with_footprint(changed, problem.costs_of(plan.batch.micro_batch_sequences), problem.allowance)
            if changed.fits:
                yield change, options, filled(problem, changed)

    def alternative(
        self, change: str, options: dict[str, Any], plan: Plan, *, most_operations: int = COARSE_OPERATIONS
    ) -> Alternative:
        """Return a variant of a plan with its times."""
        step_seconds = self._seconds_of(plan, most_operations)
        written = self._seconds_of.forecast(plan).ssd_bytes_written_per_step
        return Alternative(
            ssd_bytes_written_per_step=written,
            change=change,
            options=options,
            step_seconds=step_seconds,
            tokens_per_second=plan.batch.tokens_per_step / step_seconds,
            peak_bytes={tier: plan.peak(tier) for tier in plan.results.peak_bytes},
        )
