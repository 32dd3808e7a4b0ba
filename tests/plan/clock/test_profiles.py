"""The profiles that come with the package load, are sourced, and errors list the names."""

import dataclasses
import json
from pathlib import Path

import pytest

from headrace.plan.clock.machine_profiles import load_profile, profile_names, with_changes
from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.machine.drives import Drive

BASES = (
    "rtx4090",
    "rtx3090",
    "rtx3080",
    "rtx4060-laptop",
    "a6000",
    "a100-40g",
    "a100-80g",
    "h100",
    "h200",
    "luwu-node",
    "t4",
    "desktop-3090",
    "desktop-4090",
    "desktop-5090",
    "desktop-4060ti-16g",
)
PROMISED = [f"{base}{drives}" for base in BASES for drives in ("", "-1ssd", "-4ssd", "-12ssd")]


def test_the_promised_names_are_listed():
    assert profile_names() == tuple(sorted(BASES))


@pytest.mark.parametrize("name", PROMISED)
def test_every_figure_of_a_packaged_profile_has_its_source(name: str):
    ceilings = load_profile(name)
    assert ceilings.name == name
    assert len(ceilings.drives) == (int(name.split("-")[-1].removesuffix("ssd")) if name.endswith("ssd") else 1)
    only_measured = {
        "attention_share",
        "fresh_pages_share",
        "hidden_seconds",
        "logit_seconds",
        "head_seconds",
        "operator_seconds",
        "turn_seconds",
        "row_product_bytes_per_second",
        "attended_bytes_per_second",
        "widened_dtypes",
        "decoded_per_second",
        "network_bytes_per_second",  # no part of these machines
        "device_memory_bytes_per_second" if not ceilings.has_device else "",
    }
    without = {"name", "has_device", "drives", "sources"} | only_measured
    named = {field.name for field in dataclasses.fields(Ceilings)} - without
    # How a drive is kept busy best can only be measured on it.
    measured = {"threads_per_direction", "piece_bytes", "io_cpu_seconds_per_gigabyte"}
    named |= {f"drives.{field.name}" for field in dataclasses.fields(Drive)} - {f"drives.{name}" for name in measured}
    assert named <= set(ceilings.sources) <= named | only_measured
    assert all(len(source) > 5 for source in ceilings.sources.values())


def test_variants_differ_in_drives_only():
    one, four = load_profile("rtx4090-1ssd"), load_profile("rtx4090-4ssd")
    assert four.ssd_read_bytes_per_second == pytest.approx(4 * one.ssd_read_bytes_per_second)
    assert dataclasses.replace(four, name=one.name, drives=one.drives) == one


def test_a_name_alone_stands_for_one_ssd():
    one = load_profile("a100-40g-1ssd")
    assert dataclasses.replace(load_profile("a100-40g"), name=one.name) == one


def test_a_changed_profile_has_the_given_figures_and_the_rest_of_its_own():
    desktop = load_profile("desktop-4090-2ssd")
    given = {"cores": 8, "ram": 128 << 30, "ram_rate": 40e9, "ssd_rate": 3e9, "ssd_write_rate": 1e9, "ssd_tbw": 600.0}
    found = with_changes(desktop, given)
    drive = dataclasses.replace(
        desktop.drives[0],
        read_bytes_per_second=3e9,
        write_bytes_per_second=1e9,
        mixed_bytes_per_second=pytest.approx(desktop.drives[0].mixed_bytes_per_second * 4 / 8.1),
        rated_endurance_bytes=6e14,
    )
    assert found == dataclasses.replace(
        desktop,
        name="desktop-4090-2ssd with cores 8, ram 128 GiB, ram-rate 40 GB/s, ssd-rate 3 GB/s, ssd-write-rate 1 GB/s, "
        "ssd-tbw 600 TB",
        cores=8,
        host_memory_bytes=128 << 30,
        host_memory_bytes_per_second=40e9,
        update_bytes_per_second=pytest.approx(36e9),
        update_bytes_per_second_per_core=pytest.approx(30e9 * 40 / 65),
        drives=(drive, drive),
    )
    with pytest.raises(ConfigError, match="read_bytes_per_second"):
        with_changes(desktop, {"ssd_rate": 1e15})
    with pytest.raises(ConfigError, match="ssd_rate: 3000 bytes a second"):
        with_changes(desktop, {"ssd_rate": 3000.0})


def test_the_node_of_luwu_has_what_its_paper_says():
    node = load_profile("luwu-node-12ssd")
    assert not node.has_device
    # 26 GB/s in each direction with both at work.
    assert node.ssd_mixed_bytes_per_second == pytest.approx(52e9)
    assert node.ssd_read_bytes_per_second == pytest.approx(26e9)
    assert 32 * node.update_bytes_per_second_per_core == pytest.approx(12.5e9 / 2 * 28, rel=0.01)


def test_a_written_profile_loads_back(tmp_path: Path):
    ceilings = load_profile("h100-4ssd")
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(ceilings.to_json()))
    assert load_profile(path) == ceilings
    assert load_profile(str(path)) == ceilings


@pytest.mark.parametrize("name", ["rtx9090-1ssd", "rtx9090", "rtx4090-0ssd", "rtx4090-99ssd", "", "../rtx4090-1ssds", "ssd"])
def test_an_unknown_name_gets_the_list(name: str):
    with pytest.raises(ConfigError) as caught:
        load_profile(name)
    assert "luwu-node, rtx3080" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "open", "binary", "deep"])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not JSON"):
        load_profile(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none.json")


def test_a_nan_in_a_file_is_refused_by_name(tmp_path: Path):
    values = load_profile("h100-4ssd").to_json()
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(values | {"update_bytes_per_second": float("nan")}))
    with pytest.raises(ConfigError, match="update_bytes_per_second is nan"):
        load_profile(path)
