"""The report's findings as plain values, for scripts.

Invariant: the figures are those of the page; unknown ones are null.
"""

from typing import Any

from headrace.apps.pages.findings import find
from headrace.apps.pages.gauges import recorded_peaks
from headrace.apps.pages.page import seconds_left
from headrace.apps.pages.run_files import RunFiles
from headrace.apps.pages.sentences import bottleneck_words, endurance_words, io_cpu_words
from headrace.report.metrics import best_of


def summary(run: RunFiles) -> dict[str, Any]:
    """Return the findings of a run as JSON values. Times are in seconds, sizes in bytes, rates per second."""
    found = find(run)
    plan, ahead, written = run.plan, found.forecast, found.written
    last = run.metrics[-1] if run.metrics else {}
    scored = run.evaluations[-1] if run.evaluations else {}
    best = best_of(run.evaluations) or {}
    return {
        "run_directory": str(run.directory),
        "steps": last.get("step"),
        "total_steps": run.total_steps,
        "loss": last.get("loss"),
        "eval_loss": scored.get("eval_loss"),
        "best_eval_loss": best.get("eval_loss"),
        "best_eval_step": best.get("step"),
        "skipped_steps": [record["step"] for record in run.metrics if "skipped" in record],
        "resumed_before_steps": [record["step"] for record in run.lanes if record.get("resumed")],
        "step_seconds": found.step_seconds,
        "seconds_left": seconds_left(run, found),
        "planned_step_seconds": ahead.step_seconds if ahead else None,
        "lower_bound_seconds": ahead.lower_bound_seconds if ahead else None,
        "bottleneck": found.busiest.lane if found.busiest else None,
        "lanes": {
            share.lane: {
                "busy_seconds": share.busy_seconds,
                "idle_seconds": share.idle_seconds,
                "bytes": share.bytes,
                "busy_share": share.share,
                "planned_busy_share": _planned_share(found.forecast, share.lane),
            }
            for share in found.shares
        },
        "rates": {
            each.name: {"unit": each.unit, "busy": each.busy, "mean": each.mean, "ceiling": each.ceiling}
            for each in found.rates
        },
        "waits": {
            lane: [{"for_lane": wait.lane, "for_verb": wait.verb, "seconds": wait.seconds} for wait in waited]
            for lane, waited in found.waits.items()
        },
        "planned_peak_bytes": {tier: plan.peak(tier) for tier in plan.results.peak_bytes} if plan else None,
        "measured_peak_bytes": recorded_peaks(run.metrics),
        "planned_and_measured": (run.outcome or {}).get("planned_and_measured"),
        "stages": (run.outcome or {}).get("stages"),
        "io_cpu_seconds_per_gigabyte": found.io_cpu.seconds_per_gigabyte if found.io_cpu else None,
        "bytes_written": written.so_far_bytes if written else None,
        "bytes_written_forecast": written.forecast_bytes if written else None,
        "share_of_rated_endurance": written.wear.share_of_rating if written and written.wear else None,
        "words": [*bottleneck_words(found, run), *io_cpu_words(found), *endurance_words(found)],
        "missing": list(run.missing.values()),
    }


def _planned_share(ahead: Any, lane: str) -> float | None:
    return next((share for name, share in ahead.utilisation.items() if name == lane), None) if ahead is not None else None
