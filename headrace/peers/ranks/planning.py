"""Ranks that share out every unit: what one of them computes, keeps and moves in a step.

Ranks of one machine share its drives, cores and memory, and have one host copy of weights. With a link each rank is a machine
of its own. The plan is that of the rank with the largest share. Its memory is planned as a run plans it.
"""

from dataclasses import dataclass, replace
from typing import Any

from headrace.ask.answer import plan_model, step_lengths_of
from headrace.ask.explain import explain
from headrace.ask.model_config import read_parts
from headrace.ask.place import default_host_bytes
from headrace.ask.plan_report import PlanReport
from headrace.plan.clock.machine_profiles import load_bare_profile
from headrace.plan.schedules.ranks import RankMachine, share_of_machine
from headrace.terms.errors import ConfigError
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import figures
from headrace.update.combinations import refuse_in_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReport:
    """The `plan` of the rank with the largest share of a step of `tokens_per_step`, of `ranks` on so many `machines`."""

    plan: PlanReport
    ranks: int
    machines: int
    tokens_per_step: int
    link_bytes_per_second: float

    @property
    def step_seconds(self) -> float:
        """Seconds of a step; 0 where there is no plan."""
        return self.plan.forecast.step_seconds if self.plan.forecast is not None else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in a second; 0 where there is no plan."""
        return self.tokens_per_step / self.step_seconds if self.step_seconds else 0.0

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that a rank sends in a step, and as many that it receives."""
        return self.plan.forecast.timeline.lanes[Lane.NIC_DOWN].bytes if self.plan.forecast is not None else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: those of a rank's plan, and of all ranks."""
        return self.plan.to_json() | {
            "rank_tokens_per_step": self.plan.tokens_per_step,
            **figures(self, "ranks", "machines", "tokens_per_step", "tokens_per_second"),
            **figures(self, "exchanged_bytes", "link_bytes_per_second"),
        }

    def explain(self) -> str:
        """Return the report as lines for people."""
        if not self.plan.fits or self.plan.forecast is None:
            return explain(self.plan)
        moved, rate = self.exchanged_bytes, self.link_bytes_per_second
        each = "of one machine" if self.machines == 1 else "on a machine each"
        seconds = format_seconds(moved / rate)
        return "\n".join(
            (
                explain(self.plan),
                f"ranks     {self.ranks} {each}; above is the one with the largest share: {self.plan.tokens_per_step:,} of "
                f"{self.tokens_per_step:,} tokens a step",
                f"          together {plain_figure(self.tokens_per_second, 4)} tokens/s",
                f"link      a rank sends and receives {format_bytes(moved)} a step: {seconds} at {format_bytes(round(rate))}/s",
            )
        )


def plan_ranks(model: str, options: PlanOptions, *, here: bool, **more: Any) -> RanksReport:
    """Plan the training of `model` by `options.ranks` ranks; `more` is for `plan_model`.

    Raises:
        ConfigError: a step has fewer rows than there are ranks, or they cannot share out such a run. Else as `plan_model`.
    """
    ranks, machine = options.ranks, options.machine
    assert ranks is not None, "asked for"
    if machine is None:
        raise ConfigError(
            "ranks: a plan needs the machine; name it with --machine, such as rtx4090, or measure this one with "
            "`headrace bench machine`"
        )
    refuse_in_ranks(options)
    whole = load_bare_profile(machine) if isinstance(machine, str) else machine
    tokens, length = step_lengths_of(read_parts(model)[0], options)
    if tokens // length < ranks:
        raise ConfigError(
            f"tokens_per_step: {tokens} are {tokens // length} rows of {length} for {ranks} ranks; each takes whole rows: give "
            f"{ranks * length} at least"
        )
    link = options.link
    share = RankMachine.of(_machine_of_rank(whole, ranks, link), ranks, sharers=ranks if link is None else 1)
    own = -(-(tokens // length) // ranks) * length
    options = replace(
        options, ranks=None, link=None, machine=share, tokens_per_step=own, sequence_length=length, gradient_dtype="float32"
    )
    if here and options.host_memory is None:
        options = replace(options, host_memory=default_host_bytes(whole, here=True) // ranks)
    return RanksReport(
        plan=plan_model(model, options, here=here, **more),
        ranks=ranks,
        machines=1 if link is None else ranks,
        tokens_per_step=tokens,
        link_bytes_per_second=share.network_bytes_per_second,
    )


def _machine_of_rank(whole: Ceilings, ranks: int, link: str | float | None) -> Ceilings:
    """Return what a rank has: a machine and its link, or a share of the machine, whose memory is the link then."""
    if link is not None:
        return replace(whole, network_bytes_per_second=float(link))
    share = share_of_machine(whole, ranks)
    # TCP inside a machine copies each byte some four times: out of memory and into it, on either side.
    return replace(share, network_bytes_per_second=share.host_memory_bytes_per_second / 4)
