"""The findings as sentences: what limits the run, who waits for whom, what more hardware would give, how worn the SSDs are.

Invariant: a sentence is made only if its figures are known, and says whether they were measured or planned.
"""

from headrace.apps.pages.findings import Findings, together_share
from headrace.apps.pages.markup import decimal_bytes
from headrace.apps.pages.run_files import RunFiles
from headrace.terms.lanes import Lane, LaneShare, lane_named, sharing_lanes, sharing_words, split_lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.plain_figures import plain_figure
from headrace.terms.sizes import format_seconds

# As in the planner: a lane that is busy for less does not limit the step by itself.
_SATURATED = 0.85
_WORTH_A_WORD = 0.01


def lane_words(lane: str) -> str:
    """Return a lane's name within a sentence."""
    peer, number, name = split_lane(lane)
    known = lane_named(name)
    words = known.row.words if known else name
    return f"{words} of {peer} {number}" if peer else words


def bottleneck_words(found: Findings, run: RunFiles) -> list[str]:
    """Return the bottleneck in sentences, most important first."""
    sentences = []
    if found.busiest is not None and found.step_seconds is not None:
        sentences.append(_limit(found, run))
        sentences += _waiting(found)
    if found.forecast is not None:
        sentences += _planned(found)
        for words, seconds in found.doubled:
            gain = 1 - seconds / found.forecast.step_seconds
            much = f"{gain:.0%} less" if gain >= _WORTH_A_WORD else "no gain: something else limits the step then"
            sentences.append(f"With {words} the plan's step would take {format_seconds(seconds)} ({much}).")
    elif found.busiest is not None:
        sentences += _bound(found)
    return sentences + _of_stages(run)


def _of_stages(run: RunFiles) -> list[str]:
    """Return how busy the slowest stage of a run was, beside the most that it could be."""
    found = (run.outcome or {}).get("stages")
    wanted = ("utilisation", "bound", "groups", "group_seconds", "transfer_seconds")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), int | float) for name in wanted):
        return []
    group, link = (format_seconds(found[name]) for name in ("group_seconds", "transfer_seconds"))
    return [
        f"The slowest stage computed {found['utilisation']:.0%} of the steps' time, where {found['bound']:.0%} is the most.",
        f"That is G t / (G t + (S-1)(t + 2c)) with G = {found['groups']} groups, t = {group} of one, c = {link} on a link.",
    ]


def endurance_words(found: Findings) -> list[str]:
    """Return bytes written and wear in sentences."""
    written = found.written
    if written is None:
        return []
    steps = f"{written.steps} step" + ("" if written.steps == 1 else "s")
    sentences = [
        f"{decimal_bytes(written.so_far_bytes)} written to the SSDs in {steps}, {decimal_bytes(written.per_step_bytes)} a step."
    ]
    if written.forecast_bytes is not None:
        sentences.append(f"All {written.total_steps} steps will write {decimal_bytes(written.forecast_bytes)}.")
    if written.wear is not None and written.wear.written_bytes:
        wear = written.wear
        rating = "the typical rating of a drive of its size" if wear.rating_is_typical else "its rating"
        share = f"{wear.share_of_rating:.2%}" if wear.share_of_rating < 0.1 else f"{wear.share_of_rating:.0%}"
        sentences.append(
            f"The run uses {share} of the endurance of SSD {wear.drive} ({decimal_bytes(wear.drive_rated_bytes)}, {rating})."
        )
    return sentences


def io_cpu_words(found: Findings) -> list[str]:
    """Return a sentence about the CPU time that the SSDs' traffic costs."""
    cost = found.io_cpu
    if cost is None:
        return []
    of = f"{decimal_bytes(cost.step_bytes)} a step over the SSDs"
    return [f"{of} cost {plain_figure(cost.step_seconds)} CPU seconds, {plain_figure(cost.seconds_per_gigabyte)} for each GB."]


def _limit(found: Findings, run: RunFiles) -> str:
    assert found.busiest is not None
    assert found.step_seconds is not None
    share, words = found.busiest.share, lane_words(found.busiest.lane)
    for shared, lanes in sharing_lanes().items():
        together = together_share(found.measured, lanes) if found.measured is not None else 0.0
        if together > share and _slow_one_another(shared, lanes, run.ceilings):
            share, words = together, sharing_words(shared, lanes)
    step = format_seconds(found.step_seconds)
    if share >= _SATURATED:
        return f"A step takes {step} and is limited by {words}: busy for {share:.0%} of it."
    return (
        f"A step takes {step} and no lane is busy all the time: the most is {words} with {share:.0%}; "
        "the rest is waiting for one another. More memory for buffers or more tokens per step would help."
    )


def _slow_one_another(shared: LaneShare, lanes: tuple[Lane, ...], ceilings: Ceilings | None) -> bool:
    """Return whether the lanes move less together than each would alone."""
    if ceilings is None or shared.rate is None:
        return False
    alone = sum(getattr(ceilings, lane.row.rate) for lane in lanes if lane.row.rate)
    return bool(getattr(ceilings, shared.rate) < alone)


def _waiting(found: Findings) -> list[str]:
    """Return a sentence for each lane whose waits are known."""
    measured = found.measured
    if measured is None:
        return []
    sentences = []
    for lane, waited in found.waits.items():
        total = sum(wait.seconds for wait in waited)
        worth = [wait for wait in waited[:3] if wait.seconds >= _WORTH_A_WORD * measured.seconds]
        parts = ", ".join(f"{format_seconds(wait.seconds)} for {lane_words(wait.lane)} ({wait.verb})" for wait in worth)
        if total < _WORTH_A_WORD * measured.seconds:
            sentences.append(f"In step {measured.step}, {lane_words(lane)} waited for next to nothing.")
        else:
            of = f"{format_seconds(total)} of {format_seconds(measured.seconds)}"
            within = f"In step {measured.step}, {lane_words(lane)} waited {of}"
            sentences.append(f"{within}: {parts}." if parts else f"{within}, spread over many small waits.")
    return sentences


def _planned(found: Findings) -> list[str]:
    ahead = found.forecast
    assert ahead is not None
    words = f"The plan's simulation takes {format_seconds(ahead.step_seconds)} for a step, {ahead.explanation}."
    if found.step_seconds is None:
        return [words]
    against = found.step_seconds / ahead.step_seconds - 1
    how = (
        f"take {abs(against):.0%} {'longer' if against > 0 else 'less'} than planned"
        if abs(against) >= 0.005
        else "take what was planned"
    )
    bound = found.step_seconds / ahead.lower_bound_seconds if ahead.lower_bound_seconds > 0 else None
    tail = f", {bound:.2f} times the lower bound of this machine" if bound is not None else ""
    return [words, f"Measured steps {how}{tail}."]


def _bound(found: Findings) -> list[str]:
    """Return, without a machine profile, what the busy times alone say about twice the speed of the busiest lane."""
    assert found.busiest is not None
    others = [share.share for share in found.shares if share.lane != found.busiest.lane]
    gain = min(found.busiest.share / 2, found.busiest.share - max(others, default=0.0))
    if gain < _WORTH_A_WORD:
        return ["No lane alone would make the step faster: others are as busy."]
    return [f"If {lane_words(found.busiest.lane)} were twice as fast, a step could take up to {gain:.0%} less."]
