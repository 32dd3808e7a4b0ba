"""A machine profile holds only figures that can be true; every other is refused by the name of its field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.machine.drives import Drive, InFlight, striped_shares


def profile(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "rig",
        "has_device": True,
        "device_memory_bytes": 24 << 30,
        "host_memory_bytes": 64 << 30,
        "cores": 16,
        "flops_per_second": {"bfloat16": 150e12, "float32": 70e12},
        "host_to_device_bytes_per_second": 24e9,
        "device_to_host_bytes_per_second": 23e9,
        "both_ways_bytes_per_second": 40e9,
        "host_memory_bytes_per_second": 70e9,
        "update_bytes_per_second": 60e9,
        "update_bytes_per_second_per_core": 30e9,
        "drives": [drive(), drive(rated_endurance_bytes=None)],
        "launch_seconds": 1e-4,
        "transfer_seconds": 0,
        "commit_seconds": 0.01,
        "slowdowns": {"compute": {"update": 0.8}},
        "sources": {"cores": "counted"},
    }
    return values | changes


def drive(**changes: Any) -> dict[str, Any]:
    values = {
        "read_bytes_per_second": 7e9,
        "write_bytes_per_second": 5e9,
        "mixed_bytes_per_second": 8e9,
        "capacity_bytes": 2 * 10**12,
        "rated_endurance_bytes": 1.2e15,
    }
    return values | changes


REQUIRED = sorted(set(profile()) - {"launch_seconds", "transfer_seconds", "commit_seconds", "slowdowns", "sources"})
NUMBERS = [name for name in REQUIRED if isinstance(profile()[name], int | float) and name != "has_device"]
ABSURD = [0, -1, float("nan"), float("inf"), -float("inf"), 1e40, 10**400, "24GB", None, True, [1]]


def test_json_round_trip_gives_an_equal_profile():
    ceilings = Ceilings.from_json(profile())
    assert Ceilings.from_json(json.loads(json.dumps(ceilings.to_json()))) == ceilings
    assert ceilings.drives[1].rated_endurance_bytes is None


def test_how_a_drive_is_kept_busy_round_trips_and_may_be_left_out():
    tuned = drive(threads_per_direction=2, piece_bytes=4 << 20, io_cpu_seconds_per_gigabyte=0.0)
    ceilings = Ceilings.from_json(profile(drives=[tuned, drive()]))
    assert Ceilings.from_json(json.loads(json.dumps(ceilings.to_json()))) == ceilings
    assert ceilings.drives[0].in_flight == InFlight(threads=2, piece_bytes=4 << 20)
    assert ceilings.drives[0].io_cpu_seconds_per_gigabyte == 0.0
    assert ceilings.drives[1].in_flight == InFlight()
    assert [each.is_tuned for each in ceilings.drives] == [True, False]


def test_threads_of_drives_add_up_and_the_largest_piece_wins():
    slow = drive(threads_per_direction=1, piece_bytes=16 << 20)
    quick = drive(threads_per_direction=8, piece_bytes=4 << 20)
    ceilings = Ceilings.from_json(profile(drives=[slow, quick]))
    assert ceilings.in_flight(1) == InFlight(threads=1, piece_bytes=16 << 20)
    assert ceilings.in_flight(2) == InFlight(threads=9, piece_bytes=16 << 20)
    assert ceilings.in_flight(4) == InFlight(threads=25, piece_bytes=16 << 20)  # further ones are like the last
    half = Ceilings.from_json(profile(drives=[slow, drive()]))
    assert half.in_flight(2) == InFlight(threads=1 + InFlight().threads, piece_bytes=16 << 20)


def test_each_drive_of_a_run_counts_once_with_its_own_threads():
    """Also where several directories lie on one drive, and others on another."""
    slow = drive(threads_per_direction=1, piece_bytes=16 << 20)
    quick = drive(threads_per_direction=8, piece_bytes=4 << 20)
    run = Ceilings.from_json(profile(drives=[quick, quick, slow])).of_directories((0, 0, 2))
    assert run.in_flight(len(run.drives)) == InFlight(threads=9, piece_bytes=16 << 20)


def test_the_engine_keeps_its_defaults_where_no_drive_was_tuned():
    assert Ceilings.from_json(profile()).in_flight(1) == InFlight()
    assert Ceilings.from_json(profile()).in_flight(12) == InFlight()


@pytest.mark.parametrize(
    ("name", "absurd"),
    [
        ("threads_per_direction", 0),
        ("threads_per_direction", 2.5),
        ("threads_per_direction", True),
        ("threads_per_direction", 10**6),
        ("piece_bytes", 1000),
        ("piece_bytes", -4096),
        ("piece_bytes", 1 << 40),
        ("io_cpu_seconds_per_gigabyte", -0.1),
        ("io_cpu_seconds_per_gigabyte", float("nan")),
        ("io_cpu_seconds_per_gigabyte", "0.1"),
    ],
)
def test_an_absurd_setting_of_a_drive_is_named_with_its_place(name: str, absurd: object):
    with pytest.raises(ConfigError, match=rf"drives\[1\]: {name} is"):
        Ceilings.from_json(profile(drives=[drive(), drive(**{name: absurd})]))


def test_device_memory_may_be_unmeasured_and_is_then_taken_for_slow():
    ceilings = Ceilings.from_json(profile())
    assert ceilings.device_memory_bytes_per_second is None
    measured = Ceilings.from_json(profile(device_memory_bytes_per_second=1e12))
    assert measured.device_update_bytes_per_second == 1e12 > ceilings.device_update_bytes_per_second > 0
    for absurd in (value for value in ABSURD if value is not None):
        with pytest.raises(ConfigError, match="device_memory_bytes_per_second"):
            Ceilings.from_json(profile(device_memory_bytes_per_second=absurd))


def test_drives_are_pooled():
    ceilings = Ceilings.from_json(profile())
    assert ceilings.ssd_read_bytes_per_second == 14e9
    assert ceilings.ssd_write_bytes_per_second == 10e9
    assert ceilings.ssd_mixed_bytes_per_second == 16e9


def test_the_profile_of_some_directories_has_their_drives():
    """Directory i is drive i and further ones are like the last; those of one file system are one drive."""
    one, two = drive(), drive(read_bytes_per_second=3e9)
    ceilings = Ceilings.from_json(profile(drives=[one, two]))
    rates = {
        (0,): [7e9],
        (0, 1): [7e9, 3e9],
        (0, 1, 2, 3): [7e9, 3e9, 3e9, 3e9],
        (0, 0): [7e9],
        (0, 0, 2): [7e9, 3e9],
    }
    for file_systems, expected in rates.items():
        found = ceilings.of_directories(file_systems)
        assert [each.read_bytes_per_second for each in found.drives] == expected
        assert found.name == ceilings.name
    assert ceilings.of_directories((0, 1)) == ceilings


def test_unequal_drives_wait_for_the_one_that_is_last_with_its_stripes():
    """Stripes go by what drives do reading and writing at once: here a third and two thirds."""
    reader = drive(read_bytes_per_second=7e9, write_bytes_per_second=1e9, mixed_bytes_per_second=2e9)
    writer = drive(read_bytes_per_second=3.5e9, write_bytes_per_second=3e9, mixed_bytes_per_second=4e9)
    ceilings = Ceilings.from_json(profile(drives=[reader, writer]))
    assert striped_shares(ceilings.drives) == pytest.approx((1 / 3, 2 / 3))
    assert ceilings.ssd_read_bytes_per_second == pytest.approx(3.5e9 * 3 / 2)
    assert ceilings.ssd_write_bytes_per_second == pytest.approx(1e9 * 3)
    assert ceilings.ssd_mixed_bytes_per_second == 6e9


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_figure_is_named(name: str):
    values = profile()
    del values[name]
    with pytest.raises(ConfigError, match=name):
        Ceilings.from_json(values)


@pytest.mark.parametrize("absurd", ABSURD, ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_an_absurd_figure_is_named(name: str, absurd: object):
    with pytest.raises(ConfigError, match=name):
        Ceilings.from_json(profile(**{name: absurd}))


@pytest.mark.parametrize("absurd", [value for value in ABSURD if value is not None], ids=str)
@pytest.mark.parametrize("name", sorted(drive()))
def test_an_absurd_figure_of_a_drive_is_named_with_its_place(name: str, absurd: object):
    with pytest.raises(ConfigError, match=rf"drives\[1\]: {name}"):
        Ceilings.from_json(profile(drives=[drive(), drive(**{name: absurd})]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drives": []}, "drives"),
        ({"drives": {}}, "drives"),
        ({"drives": [7]}, r"drives\[0\]"),
        ({"flops_per_second": {}}, "flops_per_second is empty"),
        ({"flops_per_second": {"int3": 1e12}}, "int3"),
        ({"flops_per_second": {"bfloat16": 0}}, "flops_per_second: bfloat16"),
        ({"flops_per_second": 150e12}, "flops_per_second"),
        ({"both_ways_bytes_per_second": 60e9}, "both_ways_bytes_per_second"),
        ({"drives": [drive(mixed_bytes_per_second=15e9)]}, "mixed_bytes_per_second"),
        ({"update_bytes_per_second_per_core": 90e9}, "update_bytes_per_second_per_core"),
        ({"update_bytes_per_second": 90e9}, "update_bytes_per_second"),
        ({"has_device": 1}, "has_device"),
        ({"has_device": False}, "device_memory_bytes"),
        ({"device_memory_bytes": 0}, "device_memory_bytes"),
        ({"cores": 1.5}, "cores"),
        ({"commit_seconds": -1}, "commit_seconds"),
        ({"launch_seconds": float("nan")}, "launch_seconds"),
        ({"hidden_seconds": -1e-9}, "hidden_seconds"),
        ({"logit_seconds": "fast"}, "logit_seconds"),
        ({"head_seconds": 11}, "head_seconds"),
        ({"attention_share": 0}, "attention_share"),
        ({"attention_share": 2}, "attention_share"),
        ({"fresh_pages_share": 0}, "fresh_pages_share"),
        ({"fresh_pages_share": 1.5}, "fresh_pages_share"),
        ({"transfer_seconds": 60}, "transfer_seconds"),
        ({"slowdowns": {"gpu": {}}}, "gpu"),
        ({"slowdowns": {"compute": {"compute": 0.5}}}, "compute"),
        ({"slowdowns": {"compute": {"update": 1.2}}}, r"slowdowns\[compute\]: update"),
        ({"slowdowns": {"compute": 0.5}}, r"slowdowns\[compute\]"),
        ({"widened_dtypes": ["int3"]}, "widened_dtypes"),
        ({"widened_dtypes": "bfloat16"}, "widened_dtypes"),
        ({"sources": {"cores": 3}}, r"sources\[cores\]"),
        ({"name": ""}, "name"),
        ({"speed": 1}, "speed"),
    ],
)
def test_contradictions_are_named(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        Ceilings.from_json(profile(**changes))


@pytest.mark.parametrize("values", [None, [], 3, "rig"], ids=str)
def test_a_profile_that_is_no_object_is_refused(values: object):
    with pytest.raises(ConfigError, match="object"):
        Ceilings.from_json(values)


def test_a_machine_whose_cpu_computes_has_no_device_memory():
    values = profile(has_device=False)
    del values["device_memory_bytes"]
    ceilings = Ceilings.from_json(values)
    assert not ceilings.has_device
    assert ceilings.device_memory_bytes == 0


def test_optional_figures_may_be_left_out():
    values = profile()
    for name in ("launch_seconds", "transfer_seconds", "commit_seconds", "slowdowns", "sources"):
        del values[name]
    ceilings = Ceilings.from_json(values)
    assert (ceilings.launch_seconds, ceilings.slowdowns) == (0.0, {})


def test_an_unmeasured_dtype_is_named_with_the_measured_ones():
    with pytest.raises(ConfigError, match=r"'float16'.*bfloat16, float32"):
        Ceilings.from_json(profile()).matrix_flops_per_second("float16")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from(sorted(profile())), value=json_values)
def test_any_value_in_any_field_is_taken_or_refused_by_name(name: str, value: object):
    try:
        Ceilings.from_json(profile(**{name: value}))
    except ConfigError as error:
        assert str(error)  # noqa: PT017 - both outcomes are fine, any other exception is not


@given(st.floats(1e6, 1e10), st.floats(1e6, 1e10), st.floats(0.1, 1))
def test_a_drive_round_trips(read: float, write: float, share: float):
    values = drive(read_bytes_per_second=read, write_bytes_per_second=write, mixed_bytes_per_second=share * (read + write))
    made = Drive.from_json(values, where="here")
    assert Drive.from_json(made.to_json(), where="here") == made
