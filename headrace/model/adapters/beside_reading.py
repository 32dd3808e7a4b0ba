"""Reads what is computed beside blocks, of whatever kind a directory's `adapter_config.json` says it is."""

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.model.adapters.adapter_config import read_adapter_json
from headrace.model.adapters.adapter_reading import read_adapters
from headrace.model.adapters.row_table_files import PEFT_TYPE, read_tables
from headrace.model.blocks.beside import StoredBeside
from headrace.model.chain.chain import Chain
from headrace.model.directory.matching import WeightMap

_READERS: Mapping[str, Callable[[Path, Chain, WeightMap], StoredBeside]] = {PEFT_TYPE: read_tables}


def read_beside(directory: Path, chain: Chain, weights: WeightMap) -> StoredBeside:
    """Read the adapters or tables in `directory` for the model of `chain`.

    Raises:
        ModelError: there are none, they are of another kind, or of another model; the message says which tensor.
    """
    kind = str(read_adapter_json(directory).get("peft_type"))
    return _READERS.get(kind, read_adapters)(directory, chain, weights)
