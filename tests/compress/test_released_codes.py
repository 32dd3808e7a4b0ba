"""A compression reads nothing of a block that it has released: with NaN there it writes the same bytes.

Run: pytest tests/compress/test_released_codes.py
"""

from pathlib import Path

import pytest
from compressing import SIZES, files_of, run
from poisoned import Poison

from headrace.terms.program import Pool


@pytest.mark.deep
def test_a_compression_reads_nothing_that_was_released(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(dense, tmp_path / "plain")
    poison = Poison(monkeypatch)
    run(dense, tmp_path / "poisoned")
    assert files_of(tmp_path / "poisoned") == files_of(tmp_path / "plain")
    assert poison.filled[Pool.ROUNDED] == SIZES["num_hidden_layers"]
