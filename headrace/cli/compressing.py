"""`compress_model` and `decompress_model`: from words to options, and what is printed about the work.

Invariant: a message about a stop says how to go on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cli.plain_errors import INTERRUPTED, leave
from headrace.cli.screen import show
from headrace.process import cache_directory
from headrace.terms.options.compress_options import CompressOptions


def decompress_model(model: Path, out: Path) -> None:
    """Write the decoded weights of `model` to `out`."""
    from headrace.compress.decompression import decompress_model

    decompress_model(model, out)
    show(f"wrote {out}")


def compress_model(model: Path, out: Path, options: Mapping[str, Any]) -> None:
    """Compress `model` into `out`; a stop signal ends the process with 130."""
    wanted = CompressOptions.of({"cache": cache_directory(), **options, "model": model, "output": out})

    from headrace.codec.table import code_to_write  # late, as is what follows: it imports the model library
    from headrace.compress.recoding import recode, recoded_table
    from headrace.compress.run import compress_model, result_table

    direct = code_to_write("to", wanted.to).direct is not None
    try:
        show(recoded_table(recode(wanted, say=show)) if direct else result_table(compress_model(wanted, say=show)))
    except KeyboardInterrupt:
        leave("interrupted; the same command resumes after the last finished block", INTERRUPTED)
