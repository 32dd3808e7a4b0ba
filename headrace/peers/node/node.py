"""A node's engine, LuWu's central optimizer node: it has the state and updates it; workers compute.

It is the trainer with three parts exchanged: the plan (`plan/search/serving.py`), the schedule (`peers/node/programs.py`), and
the computing. Its workers compute the model. Import, store, updates, commits, resume and export are the trainer's own.
"""

from collections.abc import Mapping

import torch

from headrace.engine.trainer import Engine
from headrace.flow.step.step_batch import with_idle_rows
from headrace.flow.step.steps import ProgramBuilders, Steps
from headrace.model import persistent_buffers
from headrace.peers.node.crowd import Crowd, Setup, layouts_digest
from headrace.peers.node.programs import build_scoring, build_serving, build_serving_tail
from headrace.plan.schedules.ledger import Snapshot
from headrace.plan.search.serving import grouping_of, serving_plan, with_grouping
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.events import Evaluation, Notice, Planned
from headrace.terms.options.options import Options
from headrace.terms.program import Program
from headrace.update.combinations import refuse_combination


class NodeEngine(Engine):
    """An engine whose `seams` have workers. A step waits for them; if one is lost, the step fails, and `resume` goes on."""

    _has_all_rows = False
    _search = staticmethod(serving_plan)
    _keeps_plan = "a node keeps its plan, on which its workers rely; end the run, and resume it with other budgets"

    @classmethod
    def _check(cls, options: Options) -> None:
        refuse_combination(options, at_node=True)

    def _ready(self, sequences: int, length: int) -> Steps:
        plan = self.plan
        if plan is None:
            plan = self._planner.plan(sequences * length, length, state=self.store.manifest)
        planned = plan.batch.sequence_length
        rows = plan.batch.tokens_per_step // planned
        if self.chain.collects_asides:
            self._crowd.limit_to(
                1,
                f"{type(self.chain.model).__name__} has router losses of a whole step, which are not gathered from workers "
                "yet. Use one worker, or leave them out: router_aux_loss_coef 0",
            )
        self._crowd.limit_to(rows, f"a step has {rows} rows; give fewer workers")
        if sequences > max(rows, rows * planned // length):
            raise DataError(f"batch: {sequences} rows of {length} tokens; the node's run takes {rows} of {planned} at most")
        if self._steps is not None and self._crowd.may_grow:
            self.rest()
            self._crowd.grow()
        if self._steps is None:
            terms = self._crowd.gather(self._setup(plan), lambda text: self._emit(Notice(text=text, level="info")))
            self.plan = plan = with_grouping(plan, terms.grouping)
            self._emit(Planned(plan=plan))

            # Only workers know into how many micro-batches they cut a step.
            def serve(plan: Plan, num_micro_batches: int, before: Snapshot, *, durable: bool) -> tuple[Program, Snapshot]:
                return build_serving(plan, terms.turns, before, durable=durable)

            def score(plan: Plan, num_micro_batches: int, before: Snapshot) -> tuple[Program, Snapshot]:
                return build_scoring(plan, terms.scoring_turns, before)

            self._schedule = ProgramBuilders(serve, build_serving_tail, score)
            self._steps = self._build_steps(plan)
            # A lane that failed sends no more, so workers push no more: who waits for them must be told.
            self._steps.heed(lambda failure: self._crowd.break_off(f"the node's step failed: {failure}"))
        return self._steps

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Evaluation:
        """Return the mean loss of a batch, as `Engine.evaluate`. Each worker gets rows: where there are too few, rows without
        labels are added.
        """
        if self.plan is not None and "input_ids" in batch:
            least = (self._crowd.muster.most - 1) * self.plan.batch.micro_batch_sequences + 1
            batch = with_idle_rows(batch, least)
        return super().evaluate(batch)

    def next_logits(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Refused: workers send losses, not logits.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("next_logits: a node's workers send losses, not logits; load what the run has exported")

    @property
    def _crowd(self) -> Crowd:
        workers = self._subject.seams.workers
        assert isinstance(workers, Crowd), "a node has workers"
        return workers

    def _setup(self, plan: Plan) -> Setup:
        return Setup(
            config=self.chain.config.to_dict(),
            options=self.options.to_record(),
            sequences=plan.batch.tokens_per_step // plan.batch.sequence_length,
            length=plan.batch.sequence_length,
            grouping=grouping_of(plan),
            layouts=layouts_digest(self.chain.layouts),
            total_steps=self.options.max_steps or 0,
            buffers=persistent_buffers(self.chain.model),
            most=self._crowd.muster.most,
            spares=self._crowd.muster.is_elastic,
        )
