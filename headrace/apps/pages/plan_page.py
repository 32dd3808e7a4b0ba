"""The page of a plan: memory of each tier, a step's lanes, what limits it. Nothing was run."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from headrace.apps.pages.findings import Findings, find
from headrace.apps.pages.page import render_plan
from headrace.apps.pages.run_files import RunFiles
from headrace.apps.pages.views import planned_view
from headrace.files.durable import write_whole
from headrace.plan.forecast.forecast import Forecast
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError


def write_plan_page(path: Path, name: str, plan: Plan, ahead: Forecast | None, doubled: Mapping[str, float]) -> Path:
    """Write the page of `plan`, with its forecast, and return its path. `doubled`: seconds of a step with twice of a part.

    Raises:
        ConfigError: the file cannot be written.
    """
    run = RunFiles(directory=Path(name), plan=plan, missing={})
    found: Findings = find(run)
    if ahead is not None:
        faster = tuple((f"twice the {part}", seconds) for part, seconds in doubled.items())
        found = replace(found, planned=planned_view(ahead.timeline), forecast=ahead, doubled=faster)
    try:
        write_whole(path, render_plan(run, found))
    except OSError as error:
        raise ConfigError(f"html: {path} cannot be written ({error.strerror}); give another file") from error
    return path
