"""Files as streams of bytes, as they are or packed: `.gz` and `.zst` are unpacked while they are read.

Invariant: what is read is the whole content, or an error: a packed file that ends early is no shorter file.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headrace.terms.errors import DataError

PACKED = (".gz", ".zst")


def form_of(path: Path) -> str:
    """Return the suffix that says what is in the file, such as `.jsonl` of `a.jsonl.gz`."""
    return path.with_suffix("").suffix if path.suffix in PACKED else path.suffix


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open the content of a file.

    Raises:
        DataError: it is packed, and damaged.
    """
    if path.suffix not in PACKED:
        with path.open("rb") as file:
            yield file
        return
    try:
        packed: Any = gzip.open(path) if path.suffix == ".gz" else _zst(path)  # noqa: SIM115 -- closed below
        with packed:
            yield packed
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: cannot be unpacked ({error}); fetch the file again") from error
    except OSError as error:
        if error.errno is not None:  # the system's; pyarrow's own have no number
            raise
        raise DataError(f"{path}: cannot be unpacked ({error}); fetch the file again") from error


def _zst(path: Path) -> Any:
    import pyarrow  # late: plain files do without it

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
