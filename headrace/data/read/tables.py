"""Parquet files and Arrow files, read by `pyarrow`; saved data sets and Hub data sets, read by `datasets`.

Only this module imports either, and only when a table is read: importing `datasets` takes a second, which JSON need not pay.
Local tables are read about a megabyte at a time, so that neither memory nor a copy on a drive depends on their size. `datasets`
keeps the log level that it had.

Invariants: a row has the values that it was made of. Tables unite the objects of all rows, so fields that are null go, at every
depth of conversations. And a column that no form of data reads may hold whatever it likes: it is not converted.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from headrace.data.chat.columns import Columns
from headrace.data.chat.forms import CONVERSATIONS
from headrace.data.values.values import Row
from headrace.files.hub import HUB_SECONDS, hub_answers
from headrace.terms.errors import DataError
from headrace.terms.options.data_source import DEFAULT_SPLIT, DataSource

_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 512


def read_parquet(path: Path, columns: Columns, skip: int = 0) -> Iterator[Row]:
    """Yield the rows of a Parquet file after the first `skip`, under our names (`data/chat/columns.py`). A row group may be
    the whole file, but only pages of it are in memory. Groups that are skipped are not read.

    Raises:
        DataError: the file is empty, or is not what its name says.
    """
    parquet_file = library("pyarrow.parquet", str(path)).ParquetFile

    def batches() -> Iterator[Any]:
        with parquet_file(path, buffer_size=_BATCH_BYTES, pre_buffer=False) as file:
            groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
            row_bytes = max(1, sum(group.total_byte_size for group in groups))
            ends = list(accumulate(group.num_rows for group in groups))
            first = bisect_right(ends, skip)
            left = skip - (ends[first - 1] if first else 0)
            rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * file.metadata.num_rows // row_bytes))
            # No column at all would be read as no row: then all are read, and none is converted.
            wanted = columns.wanted(file.schema_arrow.names) or None
            kept = list(range(first, len(groups)))
            for batch in file.iter_batches(batch_size=rows, row_groups=kept, columns=wanted, use_threads=False):
                past = min(left, batch.num_rows)
                left -= past
                yield batch.slice(past), file.schema_arrow

    return _rows(path, "Parquet", batches, columns, skip)


def read_arrow(path: Path, columns: Columns) -> Iterator[Row]:
    """Yield the rows of an Arrow file, under our names. It is mapped, so that the kernel may drop what is in memory of it.

    Raises:
        DataError: the file is empty, or is not what its name says.
    """
    pyarrow = library("pyarrow", str(path))

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_file(source)
                whole = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:  # the file has the other of the two forms
                source.seek(0)
                whole = iter(pyarrow.ipc.open_stream(source))
            for batch in whole:
                yield from ((piece, batch.schema) for piece in _pieces(batch))

    return _rows(path, "Arrow", batches, columns)


def _rows(
    path: Path, form: str, batches: Callable[[], Iterator[tuple[Any, Any]]], columns: Columns, index: int = 0
) -> Iterator[Row]:
    """Yield the rows of `batches`, of which the first is row `index` of the file."""
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; expected {form} with at least one row")
    made = batches()
    features: Mapping[str, Any] | None = None
    while True:
        try:
            found = next(made, None)
            if found is None:
                return
            batch, schema = found
            features = _features(schema) if features is None else features
            values = _values(str(path), batch, schema.names, features, columns)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{path}: is not readable as {form}; write it again ({type(error).__name__}: {first_line(error)})"
            ) from error
        for row in values:
            yield Row(f"{path}, row {index}", row)
            index += 1


def _pieces(batch: Any) -> Iterator[Any]:
    rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


@dataclass(frozen=True)
class _NotConverted:
    """Stands for a value of a column that is not read, or cannot be converted. An error shows it where it is asked for."""

    why: str

    def __repr__(self) -> str:
        return self.why


def _values(place: str, batch: Any, names: list[str], features: Mapping[str, Any], wanted: Columns) -> list[dict[str, Any]]:
    """Return the rows of a record batch, each with our names for all `names`; of those that nobody reads, the names alone.

    Raises:
        DataError: a column is missing; or one cannot be converted, and every column is `wanted`.
    """
    wanted.refuse_missing(place, names)
    ours = wanted.ours(names)
    columns: dict[str, list[Any]] = {
        name: [_NotConverted("a column that is not read")] * batch.num_rows for name in ours.values()
    }
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name in ours and wanted.reads(ours[name]):
            found = columns[ours[name]] = _converted(ours[name], column, features.get(name))
            if wanted.every and isinstance(wrong := next(iter(found), None), _NotConverted):
                raise DataError(f"{place}: column {name!r} has {wrong}; convert it, or take the column out")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _converted(name: str, column: Any, feature: Any) -> list[Any]:
    try:
        values = column.to_pylist()
        if feature is not None:
            decode = library("datasets", "objects kept as text").Features({name: feature}).decode_example
            values = [decode({name: value})[name] for value in values]
    except (ValueError, OverflowError, TypeError, LookupError, ImportError) as error:  # of another form's column, it may be
        return [_NotConverted(f"a value that cannot be read ({type(error).__name__}: {first_line(error)})")] * len(column)
    return [_without_nulls(value, feature) for value in values] if name in CONVERSATIONS else values


def _without_nulls(value: Any, feature: Any) -> Any:
    """Return `value` without the fields that are null, which a table adds where other rows have them. What `datasets` stored as
    JSON, says `feature`, has only fields of its own.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        inner = feature if isinstance(feature, Mapping) else {}
        return {name: _without_nulls(each, inner.get(name)) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        of = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        return [_without_nulls(each, of) for each in value]
    return value


def _features(schema: Any) -> Mapping[str, Any]:
    """Return the features of columns in which `datasets` keeps objects of several shapes as JSON, as the schema says."""
    if b"Json" not in (schema.metadata or {}).get(b"huggingface", b""):
        return {}
    return _with_json(library("datasets", "objects kept as text").Features.from_arrow_schema(schema))


def _with_json(features: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: feature for name, feature in features.items() if "Json(" in repr(feature)}


def is_saved_dataset(path: Path) -> bool:
    """Return whether the directory was written by `save_to_disk`, for a data set or a dictionary of data sets."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def read_saved(path: Path, entry: DataSource, columns: Columns) -> Iterator[Row]:
    """Yield the rows of a directory written by `save_to_disk`; of a dictionary of data sets, those of the entry's split.

    Raises:
        DataError: the directory is damaged, or its dictionary has no such split.
    """
    datasets = library("datasets", str(path))

    def load() -> Any:
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            if entry.split != DEFAULT_SPLIT:
                raise DataError(f"{path}: split {entry.split!r} was asked for, this is one data set; leave split out")
            return loaded
        if entry.split not in loaded:
            raise DataError(f"{path}: no split {entry.split!r}, found {', '.join(loaded)}; name one of these as split")
        return loaded[entry.split]

    return rows_of_data_set(str(path), load, "is not a readable saved data set; save it again", columns)


def refuse_no_answer(name: str, cache_dir: Path | None = None) -> None:
    """Refuse a Hub data set that is not in `cache_dir`, if there is one, and the Hub does not answer.

    Raises:
        DataError: it does not.
    """
    kept = cache_dir is not None and (cache_dir / name.replace("/", "___")).is_dir()
    if not kept and not hub_answers(name, "dataset"):
        raise DataError(
            f"{name}: no such file or directory here, and the Hub did not answer within {HUB_SECONDS:g} seconds; check the "
            "path, or the network"
        )


def open_hub(entry: DataSource, columns: Columns, cache_dir: Path) -> tuple[str, Callable[[], Iterator[Row]]]:
    """Return fingerprint and reader of a Hub data set, downloaded into `cache_dir` if it is not there.

    Raises:
        DataError: it is no local path, and no data set that can be downloaded, or has no such configuration or split.
    """
    datasets = library("datasets", entry.path)
    refuse_no_answer(entry.path, cache_dir)

    with _quiet():
        try:
            loaded = datasets.load_dataset(entry.path, entry.name, split=entry.split, cache_dir=str(cache_dir))
        except Exception as error:
            configuration = f" of {entry.name!r}" if entry.name else ""
            raise DataError(
                f"{entry.path}: no such file or directory here, and no Hub data set with a split {entry.split!r}"
                f"{configuration} ({type(error).__name__}: {first_line(error)}). Check the path, or the network"
            ) from error
    return f"{entry}\0{loaded._fingerprint}\n", lambda: rows_of_data_set(
        str(entry), lambda: loaded, "cannot be read; delete its copy in the cache", columns
    )


def open_streamed(entry: DataSource, columns: Columns) -> tuple[str, Callable[[], Iterator[Row]]]:
    """Return a name and the reader of a Hub data set whose rows are fetched as they are read.

    Raises:
        DataError: the Hub does not answer, or has no such data set, configuration or split.
    """
    datasets = library("datasets", entry.path)
    refuse_no_answer(entry.path)

    def load() -> Any:
        loaded = datasets.load_dataset(entry.path, entry.name, split=entry.split, streaming=True)
        return loaded if loaded.column_names else loaded._resolve_features()  # by its first rows

    failure = "cannot be read from the Hub as it comes; resume when it can"
    return str(entry), lambda: rows_of_data_set(str(entry), load, failure, columns)


def rows_of_data_set(name: str, load: Callable[[], Any], failure: str, columns: Columns) -> Iterator[Row]:
    """Yield the rows of the data set that `load` returns, under our names. `failure` says what is wrong if it cannot be read.

    Raises:
        DataError: it cannot be read.
    """
    # Quiet around each step and not around the loop, because between two rows the caller's code runs under its own settings.
    try:
        with _quiet():
            loaded = load()
            features, names = _with_json(loaded.features), loaded.column_names
            wanted = columns.wanted(names)
            tables = iter((loaded.select_columns(wanted) if wanted else loaded).with_format("arrow").iter(_BATCH_ROWS))
        index = 0
        while True:
            with _quiet():
                table = next(tables, None)
            if table is None:
                return
            for piece in (piece for batch in table.to_batches() for piece in _pieces(batch)):
                for values in _values(name, piece, names, features, columns):
                    yield Row(f"{name}, row {index}", values)
                    index += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: {failure} ({type(error).__name__}: {first_line(error)})") from error


@contextmanager
def _quiet() -> Iterator[None]:
    import datasets

    level = datasets.logging.get_verbosity()
    bars_were_shown = not datasets.utils.are_progress_bars_disabled()
    datasets.logging.set_verbosity_error()
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if bars_were_shown:
            datasets.utils.enable_progress_bars()


def library(name: str, wanted_for: str) -> Any:
    """Return a library that reads tables. Both are dependencies of Headrace, but not everybody installs dependencies.

    Raises:
        DataError: it is not installed, or cannot be loaded.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{wanted_for}: needs the package {package}, which cannot be loaded ({first_line(error)}); install it "
            f"(pip install {package}), or give the samples as JSONL"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's words."""
    return (str(error).splitlines() or ["no message"])[0]
