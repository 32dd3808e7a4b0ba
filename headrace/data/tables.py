"""Parquet files and Arrow files, read by `pyarrow`; saved data sets and Hub data sets, read by `datasets`.

Only this module imports either, and only when a table is read: importing `datasets` takes a second, which JSON need not pay.
Local tables are read about a megabyte at a time, so that neither memory nor a copy on a drive depends on their size. `datasets`
keeps the log level that it had.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.data.values import Row
from headrace.terms.errors import DataError

_BATCH_BYTES = 1 << 20
_BATCH_ROWS = 512


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file. A row group may be the whole file, but only pages of it are in memory.

    Raises:
        DataError: the file is empty, or is not what its name says.
    """
    parquet_file = _library("pyarrow.parquet", str(path)).ParquetFile

    def batches() -> Iterator[Any]:
        with parquet_file(path, buffer_size=_BATCH_BYTES, pre_buffer=False) as file:
            row_bytes = max(1, sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)))
            rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * file.metadata.num_rows // row_bytes))
            yield from file.iter_batches(batch_size=rows, use_threads=False)

    return _rows(path, "Parquet", batches)


def read_arrow(path: Path) -> Iterator[Row]:
    """Yield the rows of an Arrow file. It is mapped, so that the kernel may drop what is in memory of it.

    Raises:
        DataError: the file is empty, or is not what its name says.
    """
    pyarrow = _library("pyarrow", str(path))

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(str(path)) as source:
            try:
                reader = pyarrow.ipc.open_file(source)
                whole = (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:  # the file has the other of the two forms
                source.seek(0)
                whole = iter(pyarrow.ipc.open_stream(source))
            for batch in whole:
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES * batch.num_rows // max(1, batch.nbytes)))
                yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))

    return _rows(path, "Arrow", batches)


def _rows(path: Path, form: str, batches: Callable[[], Iterator[Any]]) -> Iterator[Row]:
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; expected {form} with at least one row")
    index = 0
    decode: Callable[[Any], Any] | None = None
    made = batches()
    while True:
        try:
            batch = next(made, None)
            if batch is None:
                return
            decode = decode or _decoder(batch.schema)
            values = [decode(row) for row in batch.to_pylist()]
        except Exception as error:
            raise DataError(
                f"{path}: is not readable as {form}; write it again ({type(error).__name__}: {_first_line(error)})"
            ) from error
        for row in values:
            yield Row(f"{path}, row {index}", row)
            index += 1


def _decoder(schema: Any) -> Callable[[Any], Any]:
    """Return the decoder of rows. `datasets` keeps objects of several shapes as text, and says so in the schema."""
    if b"Json" not in (schema.metadata or {}).get(b"huggingface", b""):
        return lambda row: row
    datasets = _library("datasets", "objects kept as text")

    decode: Callable[[Any], Any] = datasets.Features.from_arrow_schema(schema).decode_example
    return decode


def is_saved_dataset(path: Path) -> bool:
    """Return whether the directory was written by `save_to_disk`, for a data set or a dictionary of data sets."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def read_saved(path: Path) -> Iterator[Row]:
    """Yield the rows of a directory written by `save_to_disk`; of a dictionary of data sets, those of `train`.

    Raises:
        DataError: the directory is damaged, or its dictionary has no `train`.
    """
    datasets = _library("datasets", str(path))

    def load() -> Any:
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if "train" not in loaded:
            raise DataError(f"{path}: no split 'train', found {', '.join(loaded)}; name the directory of one split")
        return loaded["train"]

    return _rows_of_data_set(str(path), load, "is not a readable saved data set; save it again")


def open_hub(name: str, cache_dir: Path) -> tuple[str, Callable[[], Iterator[Row]]]:
    """Return fingerprint and reader of split `train` of the Hub data set `name`, downloaded into `cache_dir` if it is not
    there.

    Raises:
        DataError: it is no local path, and no data set that can be downloaded.
    """
    datasets = _library("datasets", name)

    with _quiet():
        try:
            loaded = datasets.load_dataset(name, split="train", cache_dir=str(cache_dir))
        except Exception as error:
            raise DataError(
                f"{name}: no such file or directory here, and not to be had as a Hub data set with a split 'train' "
                f"({type(error).__name__}: {_first_line(error)}); check the path, or the network"
            ) from error
    return f"{name}\0{loaded._fingerprint}\n", lambda: _rows_of_data_set(
        name, lambda: loaded, "cannot be read; delete its copy in the cache"
    )


def _rows_of_data_set(name: str, load: Callable[[], Any], failure: str) -> Iterator[Row]:
    # Quiet around each step and not around the loop, because between two rows the caller's code runs under its own settings.
    try:
        with _quiet():
            rows = iter(load())
        index = 0
        while True:
            with _quiet():
                values = next(rows, None)
            if values is None:
                return
            yield Row(f"{name}, row {index}", values)
            index += 1
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: {failure} ({type(error).__name__}: {_first_line(error)})") from error


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


def _library(name: str, wanted_for: str) -> Any:
    """Return a library that reads tables. Both are dependencies of Headrace, but not everybody installs dependencies.

    Raises:
        DataError: it is not installed, or cannot be loaded.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{wanted_for}: needs the package {package}, which cannot be loaded ({_first_line(error)}); install it "
            f"(pip install {package}), or give the samples as JSONL"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]
