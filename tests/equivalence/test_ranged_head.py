"""A frozen head whose ranges come one after the other gives the bits of one that stays, wherever things live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import ROWS, SPLIT, train
from test_embedding_by_rows import CASES, life, opened, rows
from test_visiting_head import home
from tiers import sampled

from headrace.engine.trainer import Engine
from headrace.flow.weights.ranged_head import _ReadSlots
from headrace.model.parts import head_rows
from headrace.model.parts.part_slots import ModulePart, PartSlots, Slot
from headrace.terms.errors import ConfigError

STEPS = 2
RANGE_ROWS, RANGES, WIDTH = 128, 3, 64
# A range of rows, and a page at each end.
SLOT = RANGE_ROWS * WIDTH * 2 + 8192


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have three ranges of a tiny model's head, two chunks of the loss for a row, and nothing kept of most chunks."""
    monkeypatch.setattr(head_rows, "_RANGE_ELEMENTS", RANGE_ROWS * WIDTH)
    monkeypatch.setattr(head_rows, "_KEPT_BYTES", 2 * RANGE_ROWS * 16 * 2)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Get the elements of all ranges that come while compute reads another one."""
    found: list[int] = []

    def noted(begin: Callable[..., None], slots: PartSlots, slot: Slot, part: ModulePart, flat: torch.Tensor) -> None:
        before = slots.num_copied
        begin(slots, slot, part, flat)
        found.append(slots.num_copied - before)

    for kind in (PartSlots, _ReadSlots):
        begin = kind._copy_ahead
        monkeypatch.setattr(kind, "_copy_ahead", lambda *what, begin=begin: noted(begin, *what))
    return found


CHUNKS: dict[str, Any] = {"loss_chunk_tokens": 16}
RANGED: dict[str, Any] = {"visiting_head": home, "head_slot_bytes": SLOT}


@pytest.mark.wide
@pytest.mark.parametrize("case", sampled(CASES, ("a device", "matrices of blocks")))
@pytest.mark.parametrize("name", sampled(("llama", "phi3", "deepseek"), ("llama",)))
def test_it_trains_as_one_that_stays(
    name: str, case: str, model_dir: Callable[..., Path], tmp_path: Path, ahead: list[int]
) -> None:
    brought: list[int] = []

    def look(engine: Engine) -> None:
        assert engine._steps is not None
        parts = engine._steps.parts
        assert parts.buffers.residents[parts.plan.ends[-1]].numel() == 0
        assert engine.chain.head_rows == RANGE_ROWS
        assert engine.chain.model.get_output_embeddings().weight.is_meta
        assert parts.parted.head is not None
        brought.append(parts.parted.head.slots.num_copied - 64)  # without the norm

    path, options = model_dir(name, "bfloat16"), {"compute_dtype": "bfloat16", **CASES[case]}
    expected = train(path, tmp_path / "stays", steps=STEPS, adjust=SPLIT | CHUNKS, **options)
    assert not ahead
    change = SPLIT | rows() | CHUNKS | RANGED
    found = train(path, tmp_path / "comes", steps=STEPS, adjust=change, inspect=look, **options)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    # Forward and back for each micro-batch. Two ranges are there when backward, or the next one, begins.
    micros, size = STEPS * ROWS // 2, RANGE_ROWS * WIDTH
    assert brought[-1] == size * (2 * micros * (RANGES - 2) + 2)
    assert ahead[: 2 * (micros - 1)] == [size] * (2 * (micros - 1)), "all but those of the first micro-batch"


@pytest.mark.wide
@pytest.mark.parametrize("device", [None, "1GiB"])
def test_a_run_goes_on_where_it_was_and_evaluates_as_ever(
    device: str | None, model_dir: Callable[..., Path], tmp_path: Path, ahead: list[int]
) -> None:
    path = model_dir("llama", "bfloat16")
    stays, *expected = life(path, tmp_path / "stays", lambda plan: plan, device)
    comes, *found = life(
        path, tmp_path / "comes", lambda plan: replace(plan, visiting_head=home(plan), head_slot_bytes=SLOT), device
    )
    assert stays.head_slot_bytes is None
    assert comes.head_slot_bytes is not None
    assert found == expected
    assert ahead


@pytest.mark.wide
def test_a_plan_in_which_it_comes_by_ranges_is_for_heads_that_have_them(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_dir("llama", "bfloat16")
    plan = opened(path, tmp_path / "frozen", "1GiB", adapter="lora:rank=4")
    ranged = replace(plan, visiting_head="host", head_slot_bytes=SLOT)
    assert opened(path, tmp_path / "again", "1GiB", ranged, adapter="lora:rank=4").head_slot_bytes == SLOT
    said, lora = "range by range in the plan, and cannot here", {"adapter": "lora:rank=4"}
    with pytest.raises(ConfigError, match=said):
        opened(path, tmp_path / "other", "1GiB", replace(ranged, head_slot_bytes=4096), **lora)
    monkeypatch.setattr(head_rows, "_RANGE_ELEMENTS", 1 << 20)
    with pytest.raises(ConfigError, match=said):
        opened(path, tmp_path / "one range", "1GiB", replace(ranged, batch=replace(ranged.batch, head_rows=0)), **lora)
