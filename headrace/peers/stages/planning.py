"""Stages on several machines: what each computes, keeps and reads, and what a step takes over their links (AxoNN).

Each stage's plan is that of its own blocks, as a run makes it. Invariant: seconds of a step are those of the virtual clock of
stages, with the seconds that each stage's plan takes for a group.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.ask.answer import Opened, machine_of, open_question, step_lengths_of
from headrace.ask.model_config import read_parts
from headrace.peers.stages.cuts import checked_cuts, even_cuts
from headrace.peers.stages.passing_check import refuse_what_passes_more
from headrace.peers.stages.pipeline import Station, run
from headrace.peers.stages.report import StageFigures, StagesReport
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.search.serving import grouping_of
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import GROUPS_PER_STAGE, StagePlace
from headrace.terms.errors import ConfigError, PlanInfeasible
from headrace.terms.grouping import Grouping
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.plan_options import PlanOptions
from headrace.update.combinations import refuse_in_stages

# Bytes per second of a network without a given rate: 100 Mbit/s, for which stages are made.
_LINK_BYTES_PER_SECOND = 12.5e6
# Groups of a step that are tried, for each stage: more of them wait less for one another, and read weights more often.
_TRIED_GROUPS = (2, GROUPS_PER_STAGE, 8)


def plan_stages(model: str, options: PlanOptions, *, here: bool, asked_ssd: bool = True) -> StagesReport:
    """Plan the training of `model` in the stages of `options`; `asked_ssd`: its `ssd` was named, and does not stand for this
    machine's drives.

    Raises:
        ConfigError: there is no machine, there are too few blocks, or stages cannot train such a run. Else as `plan_model`.
    """
    machines = machines_of(options)
    refuse_in_stages(options)
    config, _ = read_parts(model)
    refuse_what_passes_more(config)
    tokens, length = step_lengths_of(config, options)
    own = replace(options, stages=None, link=None, cuts=(), stage_dtype=None, tokens_per_step=tokens, sequence_length=length)
    if named := not str(options.stages).isdecimal():
        # Memory and drives are those of the machines that are named: directories that stand for this one's drives say nothing.
        own = replace(own, ssd=own.ssd if asked_ssd else ())
    here = here and not named
    opened = {machine.name: open_question(model, replace(own, machine=machine), here=here) for machine in machines}
    line = _Line([opened[machine.name] for machine in machines], options)
    found = [line.report(groups * len(machines), quick=True) for groups in _TRIED_GROUPS]
    if not found[0].fits:
        return found[0]
    best = min((each for each in found if each.fits), key=lambda each: each.step_seconds)
    return line.report(best.groups, quick=False)


def machines_of(options: PlanOptions) -> list[Ceilings]:
    """Return the machine of each stage: so many times `options.machine`, or those that `stages` names.

    Raises:
        ConfigError: there is no machine, or only one stage.
    """
    text = str(options.stages)
    if not text.isdecimal():
        named = [load_profile(name.strip()) for name in text.split(",")]
    else:
        named = [machine_of(options, "stages")] * int(text)
    if len(named) < 2:
        raise ConfigError(f"stages: {text} makes one stage; give two or more, or leave it out")
    return named


class _Line:
    """Machines in a row, and what is asked of all of them."""

    def __init__(self, machines: Sequence[Opened], options: PlanOptions) -> None:
        self._machines, chain = machines, machines[0].chain
        self._num_blocks, self._tied = chain.num_blocks, chain.tied
        self._cuts = checked_cuts(options.cuts or self._even_cuts(options), len(machines), chain.num_blocks)
        self._link = float(options.link or _LINK_BYTES_PER_SECOND)
        self._token_bytes = chain.hidden_size + 4 if options.stage_dtype else 2 * chain.hidden_size

    def _even_cuts(self, options: PlanOptions) -> tuple[int, ...]:
        first = self._machines[0]
        speeds = [each.planner.ceilings.matrix_flops_per_second(options.compute_dtype) for each in self._machines]
        return even_cuts(first.planner.block_flops(first.question), len(self._machines), speeds)

    def report(self, most_groups: int, *, quick: bool) -> StagesReport:
        """Return the report with at most so many groups; the first stage that does not fit says why. `quick`: plans are those
        that fit, not the fastest.
        """
        grouping: Grouping | None = None
        stages, known = list[StageFigures](), dict[tuple[object, ...], Plan]()
        for number, opened in enumerate(self._machines):
            place = StagePlace.of(number, self._cuts, self._num_blocks, tied=self._tied, most_groups=most_groups)
            # Between the ends, what has room for more groups in flight has room for fewer.
            kind = opened.report.machine, len(place.blocks), number == 0, place.is_last
            question = replace(opened.question, place=place, workload=replace(opened.question.workload, grouping=grouping))
            try:
                plan = known.get(kind) or (opened.planner.quick_plan if quick else opened.planner.plan)(question)
            except PlanInfeasible as error:
                stages.append(StageFigures(place=place, report=replace(opened.report, reason=str(error))))
                break
            known[kind] = plan
            if plan.stage is not None and plan.stage.number != number:
                plan = opened.planner.placed_like(plan, question)
            report = replace(opened.report, plan=plan, forecast=opened.planner.forecast(plan))
            stages.append(StageFigures(place=place, report=report))
            grouping = grouping or grouping_of(plan)
        return self._timed(stages)

    def _timed(self, stages: Sequence[StageFigures]) -> StagesReport:
        report = StagesReport(
            stages=tuple(stages),
            cuts=tuple(self._cuts),
            count=len(self._machines),
            link_bytes_per_second=self._link,
            token_bytes=self._token_bytes,
        )
        if not report.fits:
            return report
        stations = [
            Station(onward=each.onward_seconds, back=each.back_seconds, in_flight=each.choices.in_flight) for each in stages
        ]
        return replace(report, step=run(stations, [report.transfer_seconds] * len(self._cuts), report.groups))
