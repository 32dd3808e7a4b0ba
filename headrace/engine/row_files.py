"""The files of tables whose rows are read and updated one by one: one for each table, in the folders of a run's state.

Invariant: a file holds rows of zeros until a commit record names what was written to it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from headrace.files import BlockFile, DirectFile
from headrace.store import StateStore
from headrace.store.run_folders import ROWS_NAME
from headrace.terms.errors import RunDirectoryError
from headrace.update.rules.rule import UpdateRule
from headrace.update.tables.lazy_rows import AppliedUpdates, LazyRows
from headrace.update.tables.table_rows import ROWS, FirstRows, OpenTable, TableRows, row_layout
from headrace.update.wires.wire import Wire


def open_row_files(
    wire: Wire,
    store: StateStore,
    rule: UpdateRule | None,
    first: Callable[[int], FirstRows] | None = None,
    gradient_dtype: str = "float32",
) -> TableRows | None:
    """Return the rows of a run's tables as its last commit left them, and let its wire serve them; None if it has none.

    A new run's files are made. `rule` updates what lies beside frozen weights. `first` gives what reads a unit's first rows,
    where these are stored. Gradients of a step are rounded to `gradient_dtype`, unless the table's have another.

    Raises:
        DiskFull: there is no space for a table.
        RunDirectoryError: a file with rows that were committed is missing.
    """
    families = wire.row_families
    if not families:
        return None
    assert rule is not None, "tables are trained families"
    record: Mapping[str, Any] = store.record.get(ROWS) or {"learning_rates": (), "histories": {}}
    found: dict[int, OpenTable] = {}
    try:
        for number, (unit, family) in enumerate(families.items()):
            lazy = LazyRows(rule, family.weight_decay, family.learning_rate_scale, replay=family.replay)
            history = tuple((session, update) for session, update in record["histories"].get(str(unit), ()))
            file = _file(store, number, unit, row_layout(family.rows, family.width, rule.planes).file_bytes, history)
            more: dict[str, Any] = {"gradient_dtype": getattr(torch, family.gradient_dtype or gradient_dtype)}
            more |= {"whole": family.whole, "name": family.name}
            if family.stored and first is not None:
                more["first"] = first(unit)
            found[unit] = OpenTable.on(file, lazy, family.rows, family.width, history, **more)
    except BaseException:
        TableRows(found, AppliedUpdates()).close()
        raise
    rows = TableRows(found, AppliedUpdates(record["learning_rates"]))
    wire.serve(rows)
    return rows


def _file(store: StateStore, number: int, unit: int, num_bytes: int, history: object) -> BlockFile:
    """Return the file of a unit's rows; tables take turns on the drives."""
    paths = store.manifest.data_paths()
    path = paths[number % len(paths)].with_name(f"{ROWS_NAME}{unit}")
    if path.exists():
        file = DirectFile.open(path)
        file.extend(num_bytes)  # a creation may have been cut short
        return file
    if history:
        raise RunDirectoryError(f"{path}: the rows of a table are missing; mount that drive or restore the file")
    return DirectFile.create(path, num_bytes)
