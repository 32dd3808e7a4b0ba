"""What the tests of the store share: a small run, and reading and writing it in words."""

from pathlib import Path
from typing import Any

import numpy as np

from headrace.files import Bytes, ThreadEngine
from headrace.machine.host_memory import huge_page_buffer
from headrace.store import StateStore, StoreRequest
from headrace.terms.events import Event
from headrace.terms.families import STATES, WEIGHTS, trained_unit
from headrace.terms.layout import UnitLayout, chunk_ranges, lay_out
from headrace.update.rules.adamw import adamw_planes

CHUNK = 2048
PLANES = adamw_planes("bfloat16")
LAYOUTS = (
    lay_out("prologue", [("embed.weight", (40, 32), (1.0, 0.1))]),
    lay_out("block 0", [("attn.weight", (64, 64), (1.0, 0.1)), ("norm.weight", (64,), (1.0, 0.0))]),
)
UNITS = tuple(trained_unit(layout, PLANES, CHUNK) for layout in LAYOUTS)


def ignore(event: Event) -> None:
    """Sink of tests that do not look at events."""


def num_chunks(layout: UnitLayout) -> int:
    return len(chunk_ranges(layout.num_elements, CHUNK))


def filled(num_bytes: int, value: int) -> Bytes:
    """Return a buffer whose content depends on `value` and on the place in it."""
    buffer = huge_page_buffer(num_bytes)
    buffer.view(np.uint64)[:] = np.arange(num_bytes // 8, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(value)
    return buffer


def make_store(folder: Path, **changes: Any) -> StateStore:
    for name in ("ssd0", "ssd1"):
        (folder / name).mkdir(exist_ok=True)
    asked: dict[str, Any] = {
        "directories": [folder / "ssd0", folder / "ssd1"],
        "units": UNITS,
        "scratch_bytes": 16 * 4096,
        "weights": [2, 1],
        "stripe_bytes": 4096,
        "identity": {"model": "tiny"},
        "allow_tmpfs": True,
    }
    asked |= {key: changes.pop(key) for key in [*changes] if key in asked or key == "beside"}
    return StateStore.create(folder / "run", StoreRequest(**asked), **{"sink": ignore, **changes})


def open_store(folder: Path, **changes: Any) -> StateStore:
    return StateStore.open(folder / "run", **{"sink": ignore, **changes})


def write_step(store: StateStore, step: int, units: tuple[int, ...] = (0, 1)) -> None:
    """Write all planes of `units` with content that names the step."""
    tickets = []
    for unit in units:
        for chunk, (start, stop) in enumerate(chunk_ranges(LAYOUTS[unit].num_elements, CHUNK)):
            tickets.append(store.write(unit, WEIGHTS, chunk, filled((stop - start) * 2, weight_value(step, unit, chunk))))
            tickets.append(store.write(unit, STATES, chunk, filled((stop - start) * 10, weight_value(step, unit, chunk) + 1)))
    for ticket in tickets:
        ticket.wait()


def weight_value(step: int, unit: int, chunk: int) -> int:
    return 1_000_000 * step + 1000 * unit + 10 * chunk + 5


def read_weights(store: StateStore, unit: int) -> Bytes:
    into = filled(LAYOUTS[unit].num_elements * 2, 99)
    store.read(unit, WEIGHTS, into).wait()
    return into


def read_states(store: StateStore, unit: int, chunk: int) -> Bytes:
    start, stop = chunk_ranges(LAYOUTS[unit].num_elements, CHUNK)[chunk]
    into = filled((stop - start) * 10, 99)
    store.read(unit, STATES, into, chunk).wait()
    return into


def expected_weights(step: int, unit: int) -> Bytes:
    parts = []
    for chunk, (start, stop) in enumerate(chunk_ranges(LAYOUTS[unit].num_elements, CHUNK)):
        size = (stop - start) * 2
        parts.append(filled(size, weight_value(step, unit, chunk)) if step else np.zeros(size, dtype=np.uint8))
    return np.concatenate(parts)


def holds_step(store: StateStore, step: int, units: tuple[int, ...] = (0, 1)) -> bool:
    """Whether every plane of `units` is that of `step`, byte for byte; step 0 is all zeros."""
    for unit in units:
        if not np.array_equal(read_weights(store, unit), expected_weights(step, unit)):
            return False
        for chunk, (start, stop) in enumerate(chunk_ranges(LAYOUTS[unit].num_elements, CHUNK)):
            size = (stop - start) * 10
            states = filled(size, weight_value(step, unit, chunk) + 1) if step else np.zeros(size, dtype=np.uint8)
            if not np.array_equal(read_states(store, unit, chunk), states):
                return False
    return True


def quick_engine(**changes: Any) -> ThreadEngine:
    return ThreadEngine(2, 2, **{"deadline_seconds": 20.0, **changes})
