"""`headrace eval`: stdout gets the figures and nothing else; stderr gets plan, progress and errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cli.generating import with_machine
from headrace.cli.plain_errors import INTERRUPTED, leave
from headrace.cli.screen import say, show, tell
from headrace.process import cache_directory, heavy_imports
from headrace.terms.errors import ConfigError
from headrace.terms.options.eval_options import EvalOptions


def evaluate_model(model: str, given: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the loss of held-out data under `model`.

    Raises:
        InputError, PlanInfeasible, StorageError: see the functions that it calls.
    """
    options = with_machine(EvalOptions.of({"cache": cache_directory(), **given}))
    if options.tasks is not None:
        _run_tasks(Path(model), options, as_json=as_json)
        return
    with heavy_imports():
        from headrace.generate.uses.evaluating import ScoringProgress, evaluate_model

    shown = 0

    def progress(found: ScoringProgress) -> None:
        nonlocal shown
        if (tenth := found.done * 10 // found.rows) > shown:
            shown = tenth
            tell(f"{found.done} of {found.rows} rows, loss {found.loss:.4f}")

    try:
        scored = evaluate_model(Path(model), options, sink=say, say=tell, progress=progress)
    except KeyboardInterrupt:
        leave("interrupted; nothing was changed", INTERRUPTED)
    show(json.dumps(scored.to_json(), indent=2) if as_json else scored.explain())


def _run_tasks(model: Path, options: EvalOptions, *, as_json: bool) -> None:
    try:
        from headrace.integrations.lm_eval import run_tasks  # late: it brings torch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0].startswith("headrace"):
            raise
        raise ConfigError(
            f"tasks: needs {error.name}, which is not installed; pip install -e '.[eval]' in the clone"
        ) from error
    try:
        found = run_tasks(model, options, say)
    except KeyboardInterrupt:
        leave("interrupted; nothing was changed", INTERRUPTED)
    show(json.dumps(found.to_json(), indent=2) if as_json else found.explain())
