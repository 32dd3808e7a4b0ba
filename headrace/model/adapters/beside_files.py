"""Directories of what is computed beside blocks: `adapter_config.json`, `adapter_model.safetensors`, a README.

Invariant: such a directory appears whole or not at all, and its configuration says which kind it is (`peft_type`).
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from headrace.model.adapters.adapter_config import CONFIG_NAME
from headrace.model.blocks.beside import BesideKind
from headrace.model.directory.matching import WeightMap
from headrace.model.stored.safetensors_file import StoredTensor
from headrace.model.stored.shard_writer import ShardWriter, shard_file_bytes
from headrace.model.written.export import appearing_model, copy_files
from headrace.terms.provenance import COMPRESSION_NOTE_NAME

PREFIX, WEIGHTS_NAME = "base_model.model.", "adapter_model"
# Files that lie beside weights and say that a directory is a whole model.
_NOT_COPIED = ("config.json", "generation_config.json", COMPRESSION_NOTE_NAME, CONFIG_NAME, "trainer_state.json")


def beside_file_bytes(adapters: BesideKind) -> int:
    """Return the bytes of the file that `write_beside` makes, which is larger by longer names in a larger model."""
    return shard_file_bytes([_stored(name, shape) for name, shape in adapters.shapes.items()])


def write_beside(
    out: Path,
    adapters: BesideKind,
    keys: Mapping[str, str],
    weights: WeightMap,
    read: Callable[[int], Mapping[str, Iterable[np.ndarray]]],
    texts: Mapping[str, str],
) -> None:
    """Write the tensors of `adapters` under their `keys`; `read` gives a unit's by name, as arrays that follow one another.

    `texts` are further files by name, the configuration among them. A README has the adapters' own notes.

    Raises:
        RunDirectoryError, ExportFailed: as `appearing_model`.
    """
    shapes = {keys[name]: shape for name, shape in adapters.shapes.items()}
    with appearing_model(out, beside_file_bytes(adapters)) as partial:
        writer = ShardWriter(partial, [[_stored(key, shape) for key, shape in shapes.items()]], WEIGHTS_NAME)
        try:
            for unit in adapters.layouts:
                for name, pieces in read(unit).items():
                    writer.write(keys[name], pieces)
            writer.finish()
        finally:
            writer.close()
        copy_files(weights.checkpoint.directory, partial, without=_NOT_COPIED)
        readme = {"README.md": "".join(f"Note: {note}.\n\n" for note in adapters.notes)} if adapters.notes else {}
        for name, text in (readme | dict(texts)).items():
            (partial / name).write_text(text, encoding="utf-8")


def _stored(key: str, shape: tuple[int, ...]) -> StoredTensor:
    return StoredTensor(key, Path(), 0, 4 * int(np.prod(shape)), "F32", shape)
