"""A coded model made ordinary again: every weight becomes the value of its code, in 16 bits.

Invariant: the directory appears whole or not at all, and is only made from files that are as they were written.
"""

import json
from pathlib import Path
from typing import Any

from headrace.compress.coded_files import file_digest
from headrace.model import Chain, Checkpoint, Exporter
from headrace.terms.errors import ModelError, RunDirectoryError
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.provenance import COMPRESSION_NOTE_NAME


def decompress_model(model: Path, out: Path) -> Path:
    """Write the weights of `model`, decoded, to `out`, and return it.

    Raises:
        ModelError: the model is not coded, or in a code that is not read, or its files are damaged.
        RunDirectoryError: `out` exists and is not empty.
        ExportFailed: there is no space, or `out` cannot be written; nothing is left there.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunDirectoryError(f"{out}: exists already; name a new directory; nothing was written")
    checkpoint = Checkpoint.open(model, decode=True)
    if not checkpoint.is_coded:
        raise ModelError(f"{model}: its weights are not coded; there is nothing to decompress")
    check_digests(model)
    chain = Chain.from_config(checkpoint.config, "float32", Optimizer())
    return Exporter(checkpoint, chain, out, lambda unit: None).write()


def check_digests(model: Path) -> None:
    """Check the files of a model that `headrace compress` wrote against the digests in its note; other models have none.

    Raises:
        ModelError: a file is not what was written, or the note is damaged.
    """
    note = model / COMPRESSION_NOTE_NAME
    if not note.is_file():
        return
    try:
        digests: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))["digests"]
        pairs = [(str(name), str(digest)) for name, digest in digests.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{note}: is damaged ({error!r}); copy the model again from its origin") from error
    for name, expected in pairs:
        if not (model / name).is_file() or file_digest(model / name) != expected:
            raise ModelError(f"{model / name}: is not the file that was written (digest {expected}); copy the model again")
