"""Bytes that change between the update and the drive are found: the update takes the checksums, in its caches.

Run: pytest tests/equivalence/test_damage_on_the_way.py
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain import batch_of
from plan_changes import changed
from tiers import sampled

import headrace
from headrace.engine.trainer import Engine
from headrace.plan.value.plan import Plan
from headrace.store import StateStore
from headrace.terms.errors import CorruptData
from headrace.terms.families import STATES, WEIGHTS

ROWS, LENGTH = 4, 32


@pytest.mark.parametrize(
    ("compute_dtype", "damaged_family"),
    sampled(
        itertools.product(["bfloat16", "float32"], [STATES, WEIGHTS, None]),
        [("bfloat16", STATES), ("float32", WEIGHTS), ("bfloat16", None)],
    ),
)
def test_what_changes_after_the_update_is_found(
    compute_dtype: str,
    damaged_family: str | None,
    model_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_ssd(plan: Plan) -> Plan:
        """States that stay in memory are written at the commit, which takes their checksums."""
        return changed(plan, resident_states=())

    options = {
        "tokens_per_step": ROWS * LENGTH,
        "sequence_length": LENGTH,
        "compute_dtype": compute_dtype,
        "max_grad_norm": None,
    }
    with Engine.open(
        model_dir("llama"),
        headrace.Options(host_memory="4GiB", learning_rate=1e-3, output=tmp_path / "run", **options),
        adjust_plan=on_ssd,
    ) as engine:
        engine.step(batch_of(ROWS, LENGTH, 0))
        engine.flush()
        damaged: list[int] = []
        if damaged_family is not None:
            write = StateStore.write

            def flip_and_write(store: StateStore, unit: int, family: str, chunk: int, data: Any, *known: Any) -> Any:
                if (unit, family) == (1, damaged_family) and not damaged:
                    damaged.append(unit)
                    data[100] ^= 4
                return write(store, unit, family, chunk, data, *known)

            monkeypatch.setattr(StateStore, "write", flip_and_write)
        engine.step(batch_of(ROWS, LENGTH, 1))
        engine.flush()
        assert engine.store is not None
        assert damaged == ([] if damaged_family is None else [1])
        if damaged_family is None:
            engine.store.verify()
        else:
            with pytest.raises(CorruptData, match="stored checksum"):
                engine.store.verify()
