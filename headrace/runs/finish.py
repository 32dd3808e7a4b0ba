"""The end of a run: the model becomes an ordinary Hugging Face directory, with a card.

Invariant: the state is removed only after the model lies complete in `final/`; if that is interrupted, `resume` does it again.
`final/` is the last that a run writes: once it exists, card and summary exist, too.
"""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headrace.data.turn_end import turn_end_file
from headrace.report import CardFacts, model_card
from headrace.report.metrics import Record
from headrace.runs.protocols import RunningEngine
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ExportFailed
from headrace.terms.provenance import PROVENANCE_NAME
from headrace.terms.run_options import RunOptions

_CARD_NAME = "README.md"
# Options that are places on somebody's machine: useless to a reader of the card, and private.
_NOT_ON_CARD = {"model", "data", "output", "ssd", "cache", "keep_state", "report_to", "interpreter"}


def write_final(engine: RunningEngine, run: RunDirectory, config: RunOptions, records: list[Record]) -> str:
    """Export the model to `final/` with its card; return a note about it, or "". The state may be removed then.

    Raises:
        ExportFailed: there is no space for both, or they cannot be written; the state is as it was.
    """
    facts = CardFacts(
        name=run.path.name,
        base_model=config.model.name,
        data=tuple(name.rstrip("/").rpartition("/")[2] for name in config.data),
        versions=installed_versions(),
        options={key: value for key, value in config.to_json().items() if key not in _NOT_ON_CARD},
        records=records,
        notes=engine.export_notes,
    )
    files, note = turn_end_file(config)
    try:
        # The export appears complete or not at all, and says what it is: if it is there, it is done.
        if _provenance(run.final) != engine.provenance:
            _refuse_another(run.final)
            engine.save_pretrained(run.final, {**files, _CARD_NAME: model_card(facts)})
        elif not (run.final / _CARD_NAME).exists():  # an export of version 0.1 could end without it
            with run.writing():
                (run.final / _CARD_NAME).write_text(model_card(facts), encoding="utf-8")
    except ExportFailed as error:
        raise ExportFailed(
            f"{error}. All steps are committed and the run is intact: `headrace resume {run.path}` then writes the model, "
            f"`headrace export {run.path} OUT` writes it elsewhere"
        ) from error
    return note


def _provenance(model: Path) -> object:
    """Return what the export in `model` says it is; None if there is none, or it says nothing."""
    try:
        return json.loads((model / PROVENANCE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _refuse_another(final: Path) -> None:
    """Refuse to take what somebody else put there for this run's model, because the run's state would then be removed."""
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ExportFailed(f"export to {final}: something else is there, and is kept; move it away")


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers. Packages that run from a source tree may have none."""
    versions = {}
    for name in ("headrace", "torch", "transformers", "numba"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions
