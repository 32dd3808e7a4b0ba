"""`export`: a run's newest weights as a model directory, as adapters, merged, or as one GGUF file.

Invariant: what is written appears whole or not at all, and the run stays as it is.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.cli.screen import show
from headrace.files.durable import appearing
from headrace.files.hub_push import push_to_hub
from headrace.files.model_directory import is_adapter_directory
from headrace.files.scratch import scratch
from headrace.runs import RunDirectory, RunOptions
from headrace.runs.protocols import RunningEngine, StateKind
from headrace.terms.errors import ConfigError, ExportFailed, RunDirectoryError
from headrace.terms.options.adapter import adapter_of
from headrace.terms.provenance import PROVENANCE_NAME
from headrace.terms.sizes import format_bytes

GGUF = ".gguf"


def export_run(run_directory: Path, out: Path, *, merge: bool = False, outtype: str | None = None) -> None:
    """Write the newest committed weights of a run to `out`; if it is finished, its final model. A run of adapters writes these,
    or with `merge` the model that results from merging them with the model beside which they were trained.

    `out` is a directory, or a file that ends with .gguf and holds `outtype`, else what most of the weights are. That is made
    from a directory beside it, so the space of both is needed for a while.

    Raises:
        ConfigError: there is nothing to merge, or the file has no such types.
        ModelError: the model has no form in GGUF.
        RunDirectoryError: `out` exists, or the run has no weights yet.
        ExportFailed: there is no space, or `out` cannot be written; nothing is left there.
    """
    if out.exists():
        raise RunDirectoryError(f"{out} exists; name a new directory; nothing was written")
    run = RunDirectory(run_directory.absolute())
    config = run.read_config()  # reports if this is no run at all
    if merge and config.adapter is None:
        raise ConfigError(f"merge: {run.path} trains no adapters; leave --merge out, its export is the whole model")
    if merge and not adapter_of(str(config.adapter)).merges:
        raise ConfigError(f"merge: {config.adapter} of {run.path} is no matrix, and cannot be merged; leave --merge out")
    if os.path.realpath(out) == os.path.realpath(run.final):
        raise RunDirectoryError(f"{out} is where the finished model of this run goes; name another directory")

    if out.suffix != GGUF:
        if outtype is not None:
            raise ConfigError(f"outtype: {out} is a directory, in the dtypes that the model came in; give OUT{GGUF}")
        _export(run, config, out.absolute(), merge=merge)
        return
    if config.adapter is not None and not merge:
        raise ConfigError(f"{out}: {run.path} trains adapters, which GGUF files do not hold; add --merge")

    from headrace.apps import OUT_TYPES, refuse_unwritable, write_gguf  # late: it imports transformers

    if outtype is not None and outtype not in OUT_TYPES:
        raise ConfigError(f"outtype: it is {outtype!r}; give one of {', '.join(OUT_TYPES)}")
    refuse_unwritable(config.model)
    with _repeatable(run), scratch(out.absolute().parent, f".{out.name}.model-") as folder:
        _export(run, config, folder / run.path.name, merge=merge)
        write_gguf(folder / run.path.name, out.absolute(), outtype)


def exported(
    run_directory: Path, out: Path, *, merge: bool, outtype: str | None, name: str | None = None, private: bool = False
) -> str:
    """Export a run as `export_run` does, and with `name` send it to that model on the Hub; return what was done.

    To be sent, a directory `out` may be there already: if it is this very export, of the same step, it is sent as it is. The
    caller has asked `refuse_unpushable`.

    Raises:
        ConfigError: `private` says nothing.
        ExportFailed: it was not sent whole. `out` is whole.
    """
    if name is None and private:
        raise ConfigError("private: given without push_to_hub; say where it goes with --push-to-hub OWNER/NAME")
    if name is None or outtype is not None or not _is_export(out, RunDirectory(run_directory.absolute()), merge=merge):
        export_run(run_directory, out, merge=merge, outtype=outtype)
    if name is None:
        return f"wrote {out}"
    show(f"wrote {out}; sending it to {name}")
    return f"{name} is at {push_to_hub(out, name, private=private)}"


def _is_export(out: Path, run: RunDirectory, *, merge: bool) -> bool:
    """Return whether `out` is what an export of the run's newest weights would write: adapters alone, or a whole model."""
    if not out.is_dir() or (told := _told_by(out)) is None:
        return False
    adapters = run.read_config().adapter is not None and not merge
    return is_adapter_directory(out) == adapters and told == _newest(run)


def _told_by(directory: Path) -> str | None:
    """Return what a model says of the run and the step that it comes from."""
    path = directory / PROVENANCE_NAME
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _newest(run: RunDirectory) -> str | None:
    """Return what the newest weights of a run would say of themselves; None if it has none yet."""
    from headrace.runs.engines import headrace_engines  # late, because it imports the kernels' compiler

    engines = headrace_engines()
    if engines.state_of(run.path) is not StateKind.COMMITTED:
        return _told_by(run.final)
    with engines.resume(run.path, to_train=False) as engine:
        return json.dumps(engine.provenance)


def _export(run: RunDirectory, config: RunOptions, out: Path, *, merge: bool) -> None:
    """Write the directory `out`, as `export_run` says."""
    from headrace.runs.engines import headrace_engines  # late, because it imports the kernels' compiler
    from headrace.store import lock_holder

    engines = headrace_engines()
    kind = engines.state_of(run.path)
    if kind is StateKind.COMMITTED:
        with engines.resume(run.path, to_train=False) as engine, _repeatable(run):
            files = _decided(config)
            if merge:
                _merge_newest(engine, run, config.model, out, files)
            else:
                engine.save_pretrained(out, files)
    elif run.final.is_dir():
        with _repeatable(run):
            if merge:
                _merge(config.model, run.final, out, _decided(config))
            else:
                _copy_final(run.final, out, _decided(config, run.final))
    elif (holder := lock_holder(run.path)) is not None:
        raise RunDirectoryError(f"{run.path}: process {holder} imports the model; export it once steps are committed")
    else:
        raise RunDirectoryError(f"{run.path}: the run was stopped before its first commit; `headrace resume` begins it again")


def _decided(config: RunOptions, final: Path | None = None) -> dict[str, str]:
    """Return the files of an export that the run decides, so that answers end where turns of its conversations do."""
    from headrace.data.batches.turn_end import turn_end_file  # late: it brings the tokenizer

    files, note = turn_end_file(config, final)
    if note:
        show(f"note: {note}")
    return files


def _merge_newest(engine: RunningEngine, run: RunDirectory, model: Path, out: Path, files: Mapping[str, str]) -> None:
    """Write a model merged with the newest adapters of a run that is not finished."""
    with tempfile.TemporaryDirectory(dir=run.path, prefix="merging-") as folder:
        engine.save_pretrained(Path(folder) / "adapter")
        _merge(model, Path(folder) / "adapter", out, files)


def _merge(model: Path, adapter: Path, out: Path, files: Mapping[str, str]) -> None:
    """Write a model merged with an adapter, with `files`; it says of which run it is."""
    from headrace.engine.merging import merge_adapters

    said = (adapter / PROVENANCE_NAME).read_text(encoding="utf-8")
    merge_adapters(model, adapter, out, {**files, PROVENANCE_NAME: said})


@contextlib.contextmanager
def _repeatable(run: RunDirectory) -> Iterator[None]:
    """Add to the message of a failed export that the run is intact."""
    try:
        yield
    except ExportFailed as error:
        raise ExportFailed(f"{error}. The run is intact: repeat `headrace export {run.path} OUT` then") from error


def _copy_final(final: Path, out: Path, files: Mapping[str, str]) -> None:
    """Copy a finished model to `out` and add `files`; it appears complete or not at all."""
    try:
        with appearing(out) as partial:
            shutil.copytree(final, partial, dirs_exist_ok=True)
            for name, text in files.items():
                (partial / name).write_text(text, encoding="utf-8")
    except OSError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise ExportFailed(f"export to {out}: {_cause(error)}; name another directory") from error
        needed = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
        free = shutil.disk_usage(Path(os.path.realpath(out)).parent).free
        raise ExportFailed(
            f"export to {out}: needs {format_bytes(needed)}, free are {format_bytes(free)}; free some space or choose another "
            "directory"
        ) from error


def _cause(error: OSError) -> str:
    """Return what the system said; `copytree` raises a list of (source, target, error), of which the first is used."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list) and error.args[0]:
        return str(error.args[0][0][-1])
    return error.strerror or str(error)
