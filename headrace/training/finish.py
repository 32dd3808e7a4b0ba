"""The end of a run: the model as an ordinary Hugging Face directory, its card, and the SSD space given back.

Invariant: the state is removed only after the model lies complete in `final/`; interrupted anywhere, `resume` ends it again.
"""

from importlib.metadata import PackageNotFoundError, version

from headrace.report import CardFacts, model_card
from headrace.report.metrics import Record
from headrace.spec.errors import ExportFailed
from headrace.training.base import RunningEngine
from headrace.training.config import RunConfig
from headrace.training.run_directory import RunDirectory

# Places on somebody's machine: of no use to a reader of the card, and private.
_NOT_ON_CARD = {"model", "data", "output", "ssd", "cache", "keep_state", "report_to", "interpreter"}


def write_final(engine: RunningEngine, run: RunDirectory, config: RunConfig, records: list[Record]) -> None:
    """Export the model to `final/` with its card; unless `keep_state`, remove the run's state (closes the engine).

    Raises:
        ExportFailed: there is no space for the model, or it cannot be written; the state is as it was.
        StorageError: the same of the card.
    """
    try:
        # The export appears complete or not at all: one that is there is done. An empty directory, or a link to one, is none.
        if not (run.final / "config.json").exists():
            engine.save_pretrained(run.final)
    except ExportFailed as error:
        raise ExportFailed(
            f"{error}. All steps are committed and the run is intact: `headrace resume {run.path}` then writes the model, "
            f"`headrace export {run.path} OUT` writes it elsewhere"
        ) from error
    facts = CardFacts(
        name=run.path.name,
        base_model=config.model.name,
        data=tuple(name.rstrip("/").rpartition("/")[2] for name in config.data),
        versions=installed_versions(),
        options=config.model_dump(mode="json", exclude=_NOT_ON_CARD),
        records=records,
    )
    with run.writing():
        (run.final / "README.md").write_text(model_card(facts), encoding="utf-8")
    if not config.keep_state:
        engine.remove_state()


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that decide the numbers. Packages that run from a source tree may have none."""
    versions = {}
    for name in ("headrace", "torch", "transformers", "numba"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed as a package"
    return versions
