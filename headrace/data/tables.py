"""Parquet files, Arrow files, saved data sets and Hub data sets, read by `datasets`.

The only module that imports `datasets`, and only when a table is read: the import takes a second that JSON need not pay.
Local tables are streamed, so that no second copy of them is written. `datasets` is left as loud as it was found.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.data.values import Row
from headrace.terms.errors import DataError


def read_table(path: Path, builder: str) -> Iterator[Row]:
    """Yield the rows of one file by the `datasets` builder `parquet` or `arrow`.

    Raises:
        DataError: the file is empty or is not what its name says.
    """
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty; expected a {builder} file with at least one row")
    import datasets

    def load() -> Any:
        return datasets.load_dataset(builder, data_files=[str(path)], split="train", streaming=True)

    return _rows(str(path), load, f"is not a readable {builder} file; write it again")


def is_saved_dataset(path: Path) -> bool:
    """Return whether the directory was written by `save_to_disk`, of a data set or of a dictionary of them."""
    return (path / "dataset_dict.json").is_file() or all(
        (path / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def read_saved(path: Path) -> Iterator[Row]:
    """Yield the rows of a directory written by `save_to_disk`; of a dictionary of data sets, those of `train`.

    Raises:
        DataError: the directory is damaged, or its dictionary has no `train`.
    """
    import datasets

    def load() -> Any:
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if "train" not in loaded:
            raise DataError(f"{path}: no split 'train', found {', '.join(loaded)}; name the directory of one split")
        return loaded["train"]

    return _rows(str(path), load, "is not a readable saved data set; save it again")


def open_hub(name: str, cache_dir: Path) -> tuple[str, Callable[[], Iterator[Row]]]:
    """Return fingerprint and reader of split `train` of the Hub data set `name`, downloaded into `cache_dir` if not there.

    Raises:
        DataError: no local path and no data set that can be had.
    """
    import datasets

    with _quiet():
        try:
            loaded = datasets.load_dataset(name, split="train", cache_dir=str(cache_dir))
        except Exception as error:
            raise DataError(
                f"{name}: no such file or directory here, and not to be had as a Hub data set with a split 'train' "
                f"({type(error).__name__}: {_first_line(error)}); check the path, or the network"
            ) from error
    return f"{name}\0{loaded._fingerprint}\n", lambda: _rows(
        name, lambda: loaded, "cannot be read; delete its copy in the cache"
    )


def _rows(name: str, load: Callable[[], Any], failure: str) -> Iterator[Row]:
    # Quiet around each step and not around the loop: between two rows the caller's code runs, under its own settings.
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no message"])[0]
