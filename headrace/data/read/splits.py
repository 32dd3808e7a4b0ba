"""Which files of a local directory are one split of a data set: `datasets`' own rule, by its README or the names of its files.

`datasets` is asked only where a name may mean a split: else all files are the training split, as there. Invariant: a file that
the rule gives to another split is not read, and no file is left out where the split that is meant is in doubt.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.data.read.tables import first_line, library
from headrace.terms.errors import DataError
from headrace.terms.options.data_source import DEFAULT_SPLIT, DataSource

_MAY_NAME = re.compile(r"train|val|dev|test|eval|^data/.*-\d{5}-of-\d{5}", re.MULTILINE)
_README = "README.md"


def files_of_split(directory: Path, files: Sequence[Path], entry: DataSource) -> list[Path]:
    """Return which of the readable `files` in `directory` are of the split, and of the configuration, that `entry` names.

    Raises:
        DataError: there is no such split; or no configuration of that name, or several and none is named.
    """
    splits = _splits(directory, files, entry)
    if splits is None:
        if entry.split != DEFAULT_SPLIT:
            raise DataError(f"{directory}: no split {entry.split!r}; all its files are one, by their names: leave split out")
        return list(files)
    by_name = {name: [file for file in files if file.resolve() in found] for name, found in splits.items()}
    by_name = {name: found for name, found in by_name.items() if found}
    if entry.split in by_name:
        return by_name[entry.split]
    if entry.split == DEFAULT_SPLIT and [list(files)] == list(by_name.values()):
        return list(files)  # there is nothing else that could be meant
    raise DataError(
        f"{directory}: no split {entry.split!r}, found {', '.join(by_name) or 'none'}, as `datasets` reads the names of files; "
        "name one of these as split, or the files"
    )


def _splits(directory: Path, files: Sequence[Path], entry: DataSource) -> dict[str, set[Path]] | None:
    """Return the files of each split; None where all files are one."""
    configurations = _configurations(directory, entry)
    names = "\n".join(file.relative_to(directory).as_posix() for file in files)
    if configurations is None and not _MAY_NAME.search(names):
        return None
    rule = library("datasets.data_files", str(directory))
    try:
        patterns = configurations or rule.get_data_patterns(str(directory.resolve()))
        found = rule.DataFilesDict.from_patterns(patterns, base_path=str(directory.resolve()))
    except Exception as error:  # whatever `datasets` raises
        raise DataError(
            f"{directory}: `datasets` finds no splits in it ({type(error).__name__}: {first_line(error)}); name the files"
        ) from error
    return {str(split): {Path(each).resolve() for each in members} for split, members in found.items()}


def _configurations(directory: Path, entry: DataSource) -> dict[str, list[str]] | None:
    """Return the patterns of files by split that the README gives for the configuration; None where it gives none."""
    found: Any = {}
    if (directory / _README).is_file():
        head = (directory / _README).read_text(encoding="utf-8", errors="replace")
        if head.startswith("---") and "configs:" in head:
            card = library("huggingface_hub", str(directory)).DatasetCard(head)
            found = library("datasets.utils.metadata", str(directory)).MetadataConfigs.from_dataset_card_data(card.data)
    of_files = {name: each["data_files"] for name, each in found.items() if each.get("data_files")}
    name = entry.name or (found.get_default_config_name() if of_files else None)
    if name is None and len(of_files) < 2:
        name = next(iter(of_files), None)
    if name not in of_files:
        if entry.name is None and not of_files:
            return None
        known = ", ".join(of_files) or "none"
        raise DataError(f"{directory}: the README has the configurations {known}; found {entry.name!r}: name one of these")
    rule = library("datasets.data_files", str(directory))
    patterns: dict[str, list[str]] = rule.sanitize_patterns(of_files[name])
    return patterns
