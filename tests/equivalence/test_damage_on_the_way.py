"""Bytes that change between the update and the drive are found: the update takes the checksums, in its caches.

Run: pytest tests/equivalence/test_damage_on_the_way.py
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain import batch_of
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.store import StateStore
from headrace.terms.errors import CorruptData

ROWS, LENGTH = 4, 32


@pytest.mark.parametrize(
    ("compute_dtype", "kind"),
    sampled(
        itertools.product(["bfloat16", "float32"], ["write_states", "write_weights", None]),
        [("bfloat16", "write_states"), ("float32", "write_weights"), ("bfloat16", None)],
    ),
)
def test_what_changes_after_the_update_is_found(
    compute_dtype: str, kind: str | None, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        "tokens_per_step": ROWS * LENGTH,
        "sequence_length": LENGTH,
        "compute_dtype": compute_dtype,
        "max_grad_norm": None,
    }
    with Engine.open(
        model_dir("llama"), headrace.Options(host_memory="4GiB", learning_rate=1e-3, output=tmp_path / "run", **options)
    ) as engine:
        engine.step(batch_of(ROWS, LENGTH, 0))
        engine.flush()
        damaged: list[int] = []
        if kind is not None:
            write = getattr(StateStore, kind)

            def flip_and_write(store: StateStore, unit: int, chunk: int, data: Any, *known: Any) -> Any:
                if unit == 1 and not damaged:
                    damaged.append(unit)
                    data[100] ^= 4
                return write(store, unit, chunk, data, *known)

            monkeypatch.setattr(StateStore, kind, flip_and_write)
        engine.step(batch_of(ROWS, LENGTH, 1))
        engine.flush()
        assert engine.store is not None
        assert damaged == ([] if kind is None else [1])
        if kind is None:
            engine.store.verify()
        else:
            with pytest.raises(CorruptData, match="stored checksum"):
                engine.store.verify()
