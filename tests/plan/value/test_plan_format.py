"""A plan is written and read in one format, and refused by name in any other."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from plan_changes import changed
from small_plans import small_plan

from headrace.plan.search.given import load_plan
from headrace.plan.value.buffer_sizes import buffer_groups, device_update_temporary_bytes, host_update_temporary_bytes
from headrace.plan.value.plan import Plan
from headrace.plan.value.speculation import Speculation
from headrace.plan.value.stored import PLAN_FORMAT
from headrace.terms.cuts import Cuts
from headrace.terms.errors import ConfigError
from headrace.terms.rule_figures import Grain

PRICES = Speculation(late_units=(1, 2), deferred_seconds=3.0, hit_seconds=2.0, redo_seconds=1.0)


def test_a_plan_comes_back_from_json_as_it_was() -> None:
    plan = small_plan(attention_flops=(1.0,) * 4, spared_flops=(2.0,) * 4, notes=("small",), peak_bytes={"host": {"all": 1}})
    for each in (plan, plan.with_results(speculation=PRICES, allowed_bytes={"host": 7})):
        assert Plan.from_json(json.loads(json.dumps(each.to_json()))) == each


def cut_plan(**changes: Any) -> Plan:
    """A plan whose units may be cut at 8 matrices of 4096 elements, 3 of 20480, and in a vector."""
    cuts = (Cuts(0, 32768, 4096, 4096), Cuts(32768, 94208, 20480, 20480), Cuts(94208, 98304, 2048, 1))
    units = tuple(replace(unit, num_elements=98304, cuts=cuts) for unit in small_plan().units)
    rule = replace(small_plan().rule, grain=Grain.MATRIX)
    return small_plan(**{"rule": rule, "units": units, "chunk_elements": 20480} | changes)


def test_chunks_of_whole_matrices_come_back_from_json_too() -> None:
    plan = cut_plan()
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_plan_whose_chunks_are_shorter_than_what_no_cut_divides_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chunk_elements 20479, .* up to 20480 elements at once; use 20480 or more"):
        cut_plan(chunk_elements=20479)
    values = cut_plan().to_json()
    (tmp_path / "plan.json").write_text(json.dumps(values | {"updates": values["updates"] | {"chunk_elements": 4096}}))
    with pytest.raises(ConfigError, match=r"plan.json.*chunk_elements 4096"):
        load_plan(tmp_path / "plan.json")


def test_what_no_cut_divides_has_room_in_the_chunk_buffers_on_host_and_device() -> None:
    plan = cut_plan(separate_device=True, device_update_every=1, update_threads=3)
    assert [plan.chunk(1, chunk) for chunk in range(plan.num_chunks(1))] == [
        (0, 20480),
        (20480, 32768),
        (32768, 53248),
        (53248, 73728),
        (73728, 94208),
        (94208, 98304),
    ]
    sizes = [plan.planes.state_bytes(size) for size in (20480, 12288, 20480, 20480, 20480, 4096)]
    assert plan.state_bytes(1) == sum(sizes)
    assert [plan.states_of_chunk(1, chunk).stop for chunk in range(6)] == list(accumulate(sizes))
    groups = buffer_groups(plan)
    assert groups["states"].num_bytes == plan.planes.state_bytes(20480)
    assert groups["device_states"].num_bytes == plan.planes.num_bytes(20480) + 20480 * plan.gradient_bytes_per_element
    assert device_update_temporary_bytes(plan) == 20480 * plan.rule.temporary_bytes
    assert host_update_temporary_bytes(plan) == 0, "all of it is updated on the device"
    half = changed(plan, device_update_every=2)
    assert host_update_temporary_bytes(half) == 3 * 20480 * plan.rule.temporary_bytes
    # A matrix that is longer than what the device works on at once makes that longer.
    whole = 1 << 21
    units = tuple(replace(unit, num_elements=whole, cuts=(Cuts(0, whole, whole, whole),)) for unit in plan.units)
    long = changed(plan, units=units, chunk_elements=whole)
    assert device_update_temporary_bytes(long) == whole * plan.rule.temporary_bytes
    assert host_update_temporary_bytes(small_plan()) == 0


def test_fields_that_a_plan_does_not_name_have_their_defaults() -> None:
    plan = small_plan()
    values = json.loads(json.dumps(plan.to_json()))
    for group, field in (("batch", "head_rows"), ("gradients", "accumulators"), ("updates", "device_every"), ("units", "cuts")):
        for each in values["placement"]["units"] if group == "units" else [values[group]]:
            assert each.pop(field) is not None
    assert Plan.from_json(values) == plan


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [("updates", "chunk_elements", "4096"), ("batch", "sequence_length", 1.5), ("batch", "speed", 1), ("stash", "kept", 1)],
)
def test_a_plan_with_a_value_of_another_type_or_an_unknown_field_is_refused(
    group: str, field: str, value: object, tmp_path: Path
) -> None:
    values = small_plan().to_json()
    (tmp_path / "plan.json").write_text(json.dumps(values | {group: values[group] | {field: value}}))
    with pytest.raises(ConfigError, match=r"plan.json: no plan of this version"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("written", [1, 2, None, 4])
def test_a_plan_of_another_format_is_refused_by_name(written: int | None, tmp_path: Path) -> None:
    values = small_plan().to_json()
    assert values.pop("format") == PLAN_FORMAT == 3
    values |= {} if written is None else {"format": written}
    # The first format had no number, and its results among its choices.
    with pytest.raises(ConfigError, match=f"format {written or 1}, this version reads format 3; use the version"):
        Plan.from_json(values)
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=f"plan.json.*format {written or 1}"):
        load_plan(tmp_path / "plan.json")
