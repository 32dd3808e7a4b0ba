"""`trainer_state.json` in the form of Hugging Face's Trainer, so that tools which plot its `log_history` work on our runs.

Invariant: the file is derived from the records of `metrics.jsonl` alone and replaced as a whole. So it never contradicts them,
and is never half written.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headrace.report.metrics import Record, best_of
from headrace.terms.events import Event, StepResult


def trainer_state(
    records: Sequence[Record],
    evaluations: Sequence[Record] = (),
    *,
    max_steps: int,
    num_train_epochs: float,
    train_batch_size: int,
    eval_steps: int | None = None,
) -> dict[str, Any]:
    """Return the fields of `transformers.TrainerState`; `train_batch_size` counts rows of a step."""
    last = records[-1] if records else {}
    best = best_of(evaluations) or {}
    return {
        "best_global_step": best.get("step"),
        "best_metric": best.get("eval_loss"),
        "best_model_checkpoint": None,
        "epoch": last.get("epoch") or 0.0,
        "eval_steps": eval_steps or 500,
        "global_step": last.get("step", 0),
        "is_hyper_param_search": False,
        "is_local_process_zero": True,
        "is_world_process_zero": True,
        "log_history": list(_log_history(records, evaluations)),
        "logging_steps": 1,
        "max_steps": max_steps,
        "num_input_tokens_seen": sum(record["tokens"] for record in records),
        "num_train_epochs": num_train_epochs,
        "save_steps": 1,
        "stateful_callbacks": {},
        "total_flos": 0,
        "train_batch_size": train_batch_size,
        "trial_name": None,
        "trial_params": None,
    }


def of_run(eval_steps: int | None, total_steps: int, steps_per_epoch: float | None, rows_per_step: int) -> dict[str, Any]:
    """Return what `trainer_state` is told of a run besides its records."""
    return {
        "eval_steps": eval_steps,
        "max_steps": total_steps,
        "num_train_epochs": total_steps / (steps_per_epoch or total_steps),
        "train_batch_size": rows_per_step,
    }


def _log_history(records: Sequence[Record], evaluations: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Yield the entry of each step, and after it that of its evaluation."""
    scored = {each["step"]: each for each in evaluations}
    for record in records:
        yield _log_entry(record)
        if found := scored.get(record["step"]):
            entry = {"epoch": record.get("epoch"), "step": record["step"]}
            yield entry | {"eval_loss": found["eval_loss"], "eval_runtime": found["eval_seconds"]}


def _log_entry(record: Record) -> dict[str, Any]:
    names = {"epoch": "epoch", "step": "step", "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
    return {theirs: record.get(ours) for theirs, ours in names.items()}


class TrainerStateFile:
    """Rewrites the file from `records` on close, and when a step ends after `every_seconds` have passed.

    The whole history is written each time; doing so after every step would take quadratic time in a long run.
    """

    def __init__(
        self,
        path: Path,
        records: Sequence[Record],
        clock: Callable[[], float],
        *,
        evaluations: Sequence[Record] = (),
        every_seconds: float = 30.0,
        **of_run: Any,
    ) -> None:
        """Write to `path`. `of_run` is what `trainer_state` is told besides."""
        self._evaluations = evaluations
        self._path, self._records, self._clock, self._every_seconds, self._of_run = path, records, clock, every_seconds, of_run
        self._written_at = float("-inf")

    def __call__(self, event: Event) -> None:
        """Take the end of a step."""
        if isinstance(event, StepResult) and self._clock() - self._written_at >= self._every_seconds:
            self._write()

    def close(self) -> None:
        """Write the final state."""
        self._write()

    def _write(self) -> None:
        state = trainer_state(self._records, self._evaluations, **self._of_run)
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        beside.replace(self._path)
        self._written_at = self._clock()
