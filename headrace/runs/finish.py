"""The end of a run: the model becomes an ordinary Hugging Face directory, with a card.

Invariant: the state is removed only after the model lies complete in `final/`; if that is interrupted, `resume` does it again.
`final/` is the last that a run writes: once it exists, card and summary exist, too.
"""

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headrace.data.batches.turn_end import turn_end_file
from headrace.files.durable import sync, write_whole
from headrace.files.hub import hub_name_of
from headrace.report import CardFacts, model_card
from headrace.report.metrics import Record, best_of
from headrace.runs.checkpoints import Checkpoints, link_model, provenance_of, remove_superseded
from headrace.runs.protocols import ExportingEngine, RunningEngine
from headrace.store.run_directory import RunDirectory
from headrace.terms.errors import ExportFailed
from headrace.terms.options.data_source import source_of
from headrace.terms.options.run_options import RunOptions
from headrace.terms.saving import Saving

_CARD_NAME = "README.md"
# Options that are places on somebody's machine: useless to a reader of the card, and private.
_NOT_ON_CARD = {"model", "data", "output", "ssd", "cache", "keep_state", "report_to", "run_name", "interpreter"}


def write_final(
    engine: ExportingEngine, run: RunDirectory, plan: Checkpoints, records: list[Record], evaluations: list[Record]
) -> str:
    """Export the model to `final/` with its card; return a note about it, or "". The state may be removed then.

    If the run asks for the best model, that is the one of the evaluation with the lowest loss. A checkpoint that has the model
    becomes `final/`; if it is kept, `final/` has the same files of weights.

    Raises:
        ExportFailed: there is no space for both, or they cannot be written; the state is as it was.
    """
    config = plan.config
    wanted, best = engine.provenance, best_of(evaluations) if config.load_best_model_at_end else None
    facts = CardFacts(
        name=run.path.name,
        base_model=hub_name_of(config.model) or config.model.name,
        data=tuple(source_of(entry).path.rstrip("/").rpartition("/")[2] for entry in config.data),
        versions=installed_versions(),
        options={key: value for key, value in config.to_json().items() if key not in _NOT_ON_CARD},
        records=records,
        notes=engine.export_notes,
        evaluations=evaluations,
    )
    files, note = turn_end_file(config)
    try:
        # The export appears complete or not at all, and says what it is: if it is there, it is done.
        if best is not None and provenance_of(run.final) != wanted:
            kept, of_best = run.checkpoint(best["step"]), {**wanted, "steps": best["step"]}
            if provenance_of(run.final) == of_best or _became_final(kept, of_best, run, _card_of(facts, best), plan):
                wanted = of_best
            else:
                note = " ".join((note, f"{kept} is gone, so {run.final.name} is the model of the last step")).strip()
        last = run.checkpoint(wanted["steps"])
        if provenance_of(run.final) != wanted and not _became_final(last, wanted, run, model_card(facts), plan):
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
    remove_superseded(run, engine.provenance["run_id"], plan, evaluations)
    return note


def _card_of(facts: CardFacts, best: Record) -> str:
    """Return the card of the best model, which is rarely that of the last step."""
    words = f"These are the weights after step {best['step']}, whose evaluation loss was the lowest"
    return model_card(replace(facts, notes=(*facts.notes, words)))


def keep_model(engine: RunningEngine, path: Path, config: RunOptions) -> Saving:
    """Begin to write the newest model of a run that goes on into the directory `path`, which appears whole.

    Raises:
        ExportFailed: there is no space, or it cannot be written; the state is as it was.
    """
    return engine.begin_saving(path, turn_end_file(config)[0])


def _became_final(kept: Path, wanted: object, run: RunDirectory, card: str, plan: Checkpoints) -> bool:
    """Give the model that was kept its card and the name `final`, besides its own if it stays; return False if it is not
    there.
    """
    if provenance_of(kept) != wanted:
        return False
    _refuse_another(run.final)
    with run.writing():
        if plan.saves:
            link_model(kept, run.final, {_CARD_NAME: card})
        else:
            write_whole(kept / _CARD_NAME, card)
            kept.replace(run.final)
            sync(run.path)
    return True


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
