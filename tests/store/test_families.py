"""Units whose families are not AdamW's: frozen, without states, scratch, with layouts of their own.

Run: pytest tests/store/test_families.py
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from store_world import CHUNK, LAYOUTS, PLANES, filled, make_store, open_store

from headrace.files import Bytes
from headrace.store import StateStore, place_units, read_manifest
from headrace.terms.errors import ConfigError, CorruptData, StorageError
from headrace.terms.families import STATES, WEIGHTS, Durability, Family, Unit, cut, trained_unit
from headrace.terms.layout import Plane, UnitLayout, lay_out

SUBSPACE = lay_out("block 0", [("compressed", (32, 64), (1.0, 0.0))])
PROJECTOR = Family(
    name="projector",
    layout=SUBSPACE,
    borders=(0, SUBSPACE.num_elements),
    planes=(Plane("values", "float32", 4), Plane("places", "uint16", 2)),
)
PAGES = Family(
    name="kv",
    layout=UnitLayout("block 0", (), (), 3 * CHUNK),
    borders=(0, CHUNK, 3 * CHUNK),  # not alike
    planes=(Plane("kv", "uint16", 2),),
    durability=Durability.SCRATCH,
)
HELD = dataclasses.replace(PAGES, name="held", durability=Durability.MEMORY)
FROZEN = Unit(LAYOUTS[0].name, (cut(WEIGHTS, LAYOUTS[0], (PLANES.weight,), CHUNK, Durability.ONCE),))
STATELESS = trained_unit(LAYOUTS[1], dataclasses.replace(PLANES, states=()), CHUNK)
RICH = Unit("block 1", (*trained_unit(LAYOUTS[1], PLANES, CHUNK).families, PROJECTOR, PAGES, HELD))
UNITS = (FROZEN, STATELESS, RICH)


def write_family(store: StateStore, unit: int, name: str, value: int) -> None:
    family = UNITS[unit].family(name)
    assert family is not None
    for chunk in range(family.num_chunks):
        store.write(unit, name, chunk, filled(family.chunk_bytes(chunk), value + chunk)).wait()


def content(store: StateStore, unit: int, name: str) -> list[Bytes]:
    family = UNITS[unit].family(name)
    assert family is not None
    found = [filled(family.chunk_bytes(chunk), 99) for chunk in range(family.num_chunks)]
    for chunk, into in enumerate(found):
        store.read(unit, name, into, chunk).wait()
    return found


def holds(store: StateStore, unit: int, name: str, value: int) -> bool:
    return all(np.array_equal(each, filled(each.size, value + chunk)) for chunk, each in enumerate(content(store, unit, name)))


def test_each_family_takes_the_slots_of_its_durability() -> None:
    places = place_units(UNITS)
    slots = {key: len(place.slot_offsets) for key, place in places.families.items()}
    assert slots == {
        (0, WEIGHTS): 1,
        (1, WEIGHTS): 2,
        (2, WEIGHTS): 2,
        (2, STATES): 2,
        (2, "projector"): 2,
        (2, "kv"): 1,
        (2, "held"): 0,
    }
    expected = sum(family.num_bytes * family.durability.slots for unit in UNITS for family in unit.families)
    assert places.durable_bytes == expected
    assert [(place.family, place.unit) for place in places.committed] == [
        (WEIGHTS, 0),
        (WEIGHTS, 1),
        (WEIGHTS, 2),
        (STATES, 2),
        ("projector", 2),
    ]


def test_the_manifest_has_every_family_and_shared_layouts_once(tmp_path: Path) -> None:
    with make_store(tmp_path, units=UNITS):
        assert read_manifest(tmp_path / "run").units == UNITS
    assert (tmp_path / "run" / "state.json").read_text().count("attn.weight") == 1


def test_each_family_is_committed_for_itself_and_what_is_written_once_stays(tmp_path: Path) -> None:
    with make_store(tmp_path, units=UNITS) as store:
        for unit, name in ((0, WEIGHTS), (1, WEIGHTS), (2, WEIGHTS), (2, "kv")):
            write_family(store, unit, name, 100 * unit + 1)
        store.commit({"step": 0})
        write_family(store, 1, WEIGHTS, 500)
        write_family(store, 2, "projector", 600)
        with pytest.raises(StorageError, match="unit prologue, weights: is written once, and was committed"):
            write_family(store, 0, WEIGHTS, 700)
        store.commit({"step": 1})
        write_family(store, 2, "projector", 800)  # never committed
        assert holds(store, 2, "kv", 201)
    with open_store(tmp_path) as store:
        store.verify()
        assert store.record == {"step": 1}
        assert holds(store, 0, WEIGHTS, 1)
        assert holds(store, 1, WEIGHTS, 500)
        assert holds(store, 2, WEIGHTS, 201)
        assert holds(store, 2, "projector", 600)
        assert all(not each.any() for each in content(store, 2, STATES))  # never written: zeros


def test_what_was_written_once_and_abandoned_may_be_written_again(tmp_path: Path) -> None:
    with make_store(tmp_path, units=UNITS) as store:
        write_family(store, 0, WEIGHTS, 1)
        store.abandon()
        write_family(store, 0, WEIGHTS, 2)
        store.commit({})
        assert holds(store, 0, WEIGHTS, 2)


def test_damage_to_frozen_weights_is_found(tmp_path: Path) -> None:
    (tmp_path / "ssd0").mkdir()
    with make_store(tmp_path, units=UNITS, directories=[tmp_path / "ssd0"], weights=None) as store:
        write_family(store, 0, WEIGHTS, 1)
        store.commit({})
    path = next((tmp_path / "ssd0").rglob("data"))
    with path.open("r+b") as file:
        file.seek(place_units(UNITS).families[0, WEIGHTS].offset(0, 0) + 5)
        file.write(b"\xff")
    with open_store(tmp_path) as store, pytest.raises(CorruptData, match="unit prologue, weights, chunk 0"):
        store.verify()


@pytest.mark.parametrize("name", ["held", "nothing"])
def test_what_has_no_place_on_the_drives_is_refused(tmp_path: Path, name: str) -> None:
    with make_store(tmp_path, units=UNITS) as store:
        with pytest.raises(StorageError, match=f"unit block 1: no family '{name}' on the drives"):
            store.read(2, name, filled(4096, 0), 0)
        with pytest.raises(StorageError, match=f"unit block 1: no family '{name}' on the drives"):
            store.write(2, name, 0, filled(4096, 0))


@pytest.mark.parametrize("borders", [(), (0,), (0, CHUNK), (1, 3 * CHUNK), (0, CHUNK, CHUNK, 3 * CHUNK), (0, 4 * CHUNK)])
def test_chunks_cover_a_family_in_order(borders: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="borders must ascend"):
        dataclasses.replace(PAGES, borders=borders)


def test_two_families_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two families of one name"):
        Unit("block 0", (PAGES, PAGES))
