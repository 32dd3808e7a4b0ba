"""The tasks of `headrace eval --tasks`: lm-eval asks and counts, the engine answers."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from headrace.integrations.lm_eval.model import HeadraceLM
from headrace.terms.errors import ConfigError, DataError, HeadraceError, in_one_line
from headrace.terms.events import Sink
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.sizes import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskScores:
    """What lm-eval found: its `results`, `seconds` and the bytes of weights read."""

    model: str
    results: dict[str, Any]
    seconds: float
    bytes_read: int

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        keys: tuple[str, ...] = ("results", "groups", "n-shot", "n-samples", "versions")
        kept: dict[str, Any] = {key: self.results[key] for key in keys if key in self.results}
        return {"model": self.model, **kept, "seconds": round(self.seconds, 3), "bytes_read": self.bytes_read}

    def explain(self) -> str:
        """Return lm-eval's table, and what it took."""
        tables = [make_table(self.results), *([make_table(self.results, "groups")] if self.results.get("groups") else [])]
        return "\n".join([*tables, f"time     {format_seconds(self.seconds)}, {format_bytes(self.bytes_read)} of weights read"])


def run_tasks(place: Path, options: EvalOptions, sink: Sink) -> TaskScores:
    """Return what the model at `place` scores in `options.tasks`.

    Raises:
        InputError: a task is unknown, its data cannot be read, or the model cannot be used.
        PlanInfeasible: it does not fit.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = options.task_names
    manager = _manager_of(names, options.include_path)
    shared = {each.key for each in GenerateOptions.declarations()} & {each.key for each in EvalOptions.declarations()}
    given = {key: getattr(options, key) for key in shared - {"machine"}}
    started = time.perf_counter()
    with HeadraceLM(place, max_length=options.sequence_length, sink=sink, machine=options.machine, **given) as model:
        try:
            found = lm_eval.simple_evaluate(
                model,
                tasks=manager.match_tasks(names),
                num_fewshot=options.num_fewshot,
                limit=options.limit,
                apply_chat_template=options.apply_chat_template,
                task_manager=manager,
                log_samples=False,
            )
        except (HeadraceError, KeyboardInterrupt):
            raise
        except (OSError, ValueError, KeyError) as error:  # datasets raises these for what it cannot load
            raise DataError(f"tasks: {', '.join(names)}: lm-eval cannot run them: {in_one_line(error)}") from error
        return TaskScores(
            model=str(place), results=dict(found or {}), seconds=time.perf_counter() - started, bytes_read=model.bytes_read
        )


def _manager_of(names: list[str], own: Path | None) -> TaskManager:
    """Return what finds the tasks; lm-eval's own are read, which takes seconds, only if the user's are not enough."""
    unknown = names
    for defaults in (False, True) if own is not None else (True,):
        manager = TaskManager(include_path=None if own is None else str(own), include_defaults=defaults)
        unknown = [name for name in names if not manager.match_tasks([name])]
        if not unknown:
            return manager
    raise ConfigError(f"tasks: lm-eval knows no {', '.join(unknown)}; `lm_eval ls tasks` lists what it knows")
