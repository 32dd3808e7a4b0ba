"""What `save_model` writes: an ordinary model directory, also where a directory is already.

Invariant: a new directory appears whole. In one that is there, `config.json` comes last.
"""

import shutil
from pathlib import Path
from typing import Any

from headrace.data.batches.turn_end import turn_end_file
from headrace.files.scratch import remove_tree
from headrace.integrations.transformers.engine_run import EngineRun
from headrace.runs.checkpoints import link_model, provenance_of


def write_model(run: EngineRun, out: Path, tokenizer: Any, *, best: Path | None, conversations: bool) -> None:
    """Write the newest model of `run` to `out`, or a copy of the model `best`. A `tokenizer` replaces the model's.

    Raises:
        ExportFailed: it cannot be written; nothing is left of it.
    """
    if best is None and provenance_of(out) == run.engine.provenance:
        return
    if best is not None and best.resolve() == out.resolve():
        return
    beside = out / ".saving" if out.exists() else out.with_name(f".{out.name}.saving")
    if beside.exists():
        remove_tree(beside)
    out.parent.mkdir(parents=True, exist_ok=True)
    if best is not None:
        link_model(best, beside, {})
    else:
        run.engine.begin_saving(beside, turn_end_file(run.config, conversations=conversations)[0]).wait()
        if tokenizer is not None:
            tokenizer.save_pretrained(str(beside))
    if not out.exists():
        beside.rename(out)
        return
    for path in sorted(beside.iterdir(), key=lambda each: each.name == "config.json"):
        if path.is_dir():
            shutil.rmtree(out / path.name, ignore_errors=True)
        path.replace(out / path.name)
    beside.rmdir()
