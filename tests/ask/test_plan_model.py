"""`plan_model`: from a config.json and a machine to a report that adds up, explains itself, and offers what fits."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cpu_work import loops_in
from planned_models import gpt3_175b, llama_70b, llama_small, saved
from tiny_wholes import make_whole

from headrace.ask import model_plans
from headrace.ask.answer import plan_model
from headrace.ask.plan_report import PlanReport
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.forecast.forecast import StepSeconds, forecast
from headrace.plan.search.problem import Problem
from headrace.plan.search.search import make_plan
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError, InputError, ModelError, StorageError
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.machine.drives import MOST_BYTES
from headrace.terms.options.options import Options
from headrace.terms.sizes import GIB


@pytest.fixture(scope="module")
def rig() -> Ceilings:
    return load_profile("rtx4090-4ssd")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "small", llama_small())


@pytest.fixture(scope="module")
def report(small: Path, rig: Ceilings) -> PlanReport:
    return plan_model(small, Options(machine=rig, tokens_per_step=4096, sequence_length=512, max_steps=200), here=False)


def test_a_small_model_fits_and_every_figure_is_there(report: PlanReport) -> None:
    values = json.loads(json.dumps(report.to_json()))
    assert values["fits"] is True
    layer = 4 * 256 * 256 + 3 * 256 * 688 + 2 * 256
    assert values["parameters"] == 6 * layer + 2 * 1000 * 256 + 256
    assert values["step_seconds"] > 0
    assert values["tokens_per_second"] == pytest.approx(4096 / values["step_seconds"])
    assert values["lower_bound_seconds"] <= values["step_seconds"]
    assert values["ssd_bytes_written_per_step"] >= 12 * values["parameters"]
    assert [each["options"] for each in values["alternatives"]] in ([], [{"checkpoint_every": 10}])
    assert values["machine"] == "rtx4090-4ssd"
    assert values["num_steps"] == 200
    assert values["run_hours"] == pytest.approx(200 * values["step_seconds"] / 3600)
    assert isinstance(values["bottleneck"], str)
    assert Plan.from_json(values["plan"]) == report.plan


@pytest.mark.wide
def test_with_a_gpu_an_update_multiplies_its_matrices_there(small: Path, rig: Ceilings) -> None:
    """All of Muon's updates: their products are counted, and take no memory on the host."""
    asked = Options(machine=rig, optimizer="muon", tokens_per_step=4096, sequence_length=512)
    plan = plan_model(small, asked, here=False).plan
    assert plan is not None
    assert plan.updates.device_every == 1
    assert "updates" not in plan.results.peak_bytes["host"]
    lanes = forecast(plan, rig).timeline.lanes
    square, oblong = (4 * 256**2 * side + 2 * 256**3 for side in (256, 688))
    assert lanes[Lane.DEVICE_UPDATE].flops == 6 * 5 * (4 * square + 3 * oblong)
    assert lanes[Lane.UPDATE].flops == 0
    free = replace(rig, flops_per_second=dict.fromkeys(rig.flops_per_second, 1e17))
    products = lanes[Lane.DEVICE_UPDATE].flops / rig.matrix_flops_per_second("bfloat16")
    slow, fast = (forecast(plan, each).timeline.lanes[Lane.DEVICE_UPDATE].alone_seconds for each in (rig, free))
    assert slow - fast == pytest.approx(products, rel=0.01)


@pytest.mark.wide
def test_fewer_checkpoints_are_offered_where_states_fit_into_memory(small: Path, rig: Ceilings) -> None:
    drive = replace(rig.drives[0], read_bytes_per_second=1e9, write_bytes_per_second=1e9, mixed_bytes_per_second=1e9)
    slow = replace(rig, drives=(drive,))
    found = plan_model(small, Options(machine=slow, tokens_per_step=512, sequence_length=512), here=False)
    offered = next(each for each in found.alternatives if each.options == {"checkpoint_every": 10})
    assert found.forecast is not None
    times = found.forecast.step_seconds / offered.step_seconds
    assert times > 2
    assert offered.change == f"lose at most 10 steps at a crash, {times:.3g} times as fast"
    asked = Options(machine=slow, tokens_per_step=512, sequence_length=512, checkpoint_every=10)
    again = plan_model(small, asked, here=False)
    assert again.forecast is not None
    assert again.forecast.step_seconds <= 1.02 * offered.step_seconds


def test_peaks_are_the_plans_and_within_the_defaults(report: PlanReport, rig: Ceilings) -> None:
    assert report.plan is not None
    assert report.allowed_bytes["device"] == int(0.9 * rig.device_memory_bytes)
    assert report.allowed_bytes["host"] == int(0.7 * rig.host_memory_bytes)
    assert report.allowed_bytes["ssd"] == int(0.9 * sum(drive.capacity_bytes for drive in rig.drives))
    for tier, allowed in report.allowed_bytes.items():
        assert report.needed_bytes[tier] == report.plan.peak(tier) <= allowed


def test_the_table_shows_tiers_time_limit_and_wear(report: PlanReport) -> None:
    text = report.explain()
    for words in ("fits      yes", "device", "host", "ssd", "weights", "states", "free", "per step", "tokens/s", "200 steps"):
        assert words in text
    assert report.forecast is not None
    assert report.forecast.explanation in text


def test_twice_of_the_bottleneck_helps_most(report: PlanReport) -> None:
    assert report.forecast is not None
    assert report.doubled
    assert all(0 < seconds <= report.forecast.step_seconds for seconds in report.doubled.values())
    lanes = {Lane.COMPUTE: "compute", Lane.SSD_READ: "SSDs", Lane.SSD_WRITE: "SSDs"}
    if report.forecast.bottleneck in lanes and report.forecast.utilisation[report.forecast.bottleneck] > 0.9:
        assert min(report.doubled, key=lambda words: report.doubled[words]) == lanes[report.forecast.bottleneck]


def test_without_a_profile_the_machine_is_called_nominal(small: Path, tmp_path: Path) -> None:
    found = plan_model(small, Options(host_memory="8GiB", ssd=[tmp_path], tokens_per_step=1024, sequence_length=512))
    assert found.fits
    assert found.measured is False
    assert "headrace bench machine" in found.explain()


@pytest.mark.wide
def test_without_a_profile_the_plan_is_the_one_that_a_run_makes(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no figures of drives either then, and does not write to them for speed."""
    problems = []

    def recorded(problem: Problem, ceilings: Ceilings | None, seconds_of: StepSeconds) -> Plan:
        problems.append(problem)
        return make_plan(problem, ceilings, seconds_of)

    monkeypatch.setattr(model_plans, "make_plan", recorded)
    found = plan_model(small, Options(host_memory="700MiB", max_grad_norm=None, tokens_per_step=8192))
    assert found.plan == make_plan(problems[0], None)
    assert found.plan is not None
    assert "ssd" not in found.plan.stash.tiers
    assert found.forecast is not None  # of a nominal machine


@pytest.mark.wide
def test_what_does_not_fit_comes_with_variants_that_do(small: Path, rig: Ceilings) -> None:
    how: dict[str, Any] = {"here": False, "variants_seconds": 250.0}
    asked = {"machine": rig, "tokens_per_step": 8192, "sequence_length": 1024}
    leanest = plan_model(small, Options(device_memory="1MiB", **asked), **how).needed_bytes["device"]
    device = leanest - (1 << 20)
    refused = plan_model(small, Options(device_memory=device, **asked), **how)
    assert not refused.fits
    assert refused.plan is None
    assert refused.needed_bytes["device"] > refused.allowed_bytes["device"]
    assert "device memory" in refused.reason
    assert {"device_memory", "sequence_length"} <= {name for found in refused.alternatives for name in found.options}
    for alternative in refused.alternatives:
        changes = {"max_grad_norm": None if "max_grad_norm" in alternative.options else 1.0} | alternative.options
        again = plan_model(small, Options(**{"device_memory": device} | asked | changes), **how)
        assert again.fits, alternative.change
        assert alternative.change in refused.explain()
        assert alternative.step_seconds > 0


@pytest.mark.wide
def test_too_little_ssd_space_is_found_here_and_not_in_the_run(small: Path, rig: Ceilings) -> None:
    drive = replace(rig.drives[0], capacity_bytes=50 << 20)
    found = plan_model(small, Options(machine=replace(rig, drives=(drive,)), tokens_per_step=1024), here=False)
    assert not found.fits
    assert found.reason.startswith("ssd")
    assert any("ssd_space" in alternative.options for alternative in found.alternatives)


@pytest.mark.wide
def test_where_space_is_short_a_plan_that_writes_less_is_found(small: Path, rig: Ceilings) -> None:
    asked: dict[str, Any] = {"tokens_per_step": 8192, "sequence_length": 1024}
    how: dict[str, Any] = {"here": False, "variants_seconds": 0.0}
    least = plan_model(small, Options(host_memory="1MiB", machine=rig, **asked), **how).needed_bytes["host"]
    tried = (plan_model(small, Options(host_memory=least + (more << 20), machine=rig, **asked), **how) for more in (16, 20, 12))
    whole = next(found for found in tried if found.plan is not None and found.plan.results.peak_bytes["ssd"]["scratch"] > 0)
    assert whole.plan is not None
    host = whole.allowed_bytes["host"]
    states = whole.plan.results.peak_bytes["ssd"]["states, two slots"]
    capacity = int((whole.needed_bytes["ssd"] - 1) / 0.9 / len(rig.drives))
    short = replace(rig, drives=tuple(replace(drive, capacity_bytes=capacity) for drive in rig.drives))
    found = plan_model(small, Options(host_memory=host, machine=short, **asked), **how)
    assert found.fits, found.reason
    assert states <= found.needed_bytes["ssd"] <= found.allowed_bytes["ssd"] < whole.needed_bytes["ssd"]


@pytest.mark.deep
def test_where_space_is_short_smaller_moments_are_offered_as_they_would_be_planned(small: Path, rig: Ceilings) -> None:
    asked: dict[str, Any] = {"tokens_per_step": 1024}
    whole = plan_model(small, Options(machine=rig, **asked), here=False)
    reduced = plan_model(small, Options(machine=rig, optimizer="adamw8bit", **asked), here=False)
    assert reduced.needed_bytes["ssd"] < 0.6 * whole.needed_bytes["ssd"]
    capacity = int((reduced.needed_bytes["ssd"] + whole.needed_bytes["ssd"]) / 2 / 0.9)
    rig = replace(rig, drives=(replace(rig.drives[0], capacity_bytes=capacity),))
    refused = plan_model(small, Options(machine=rig, **asked), here=False)
    assert not refused.fits
    offered = next(found for found in refused.alternatives if found.options == {"optimizer": "adamw:moments=int8"})
    assert offered.change in refused.explain()
    again = plan_model(small, Options(machine=rig, **offered.options, **asked), here=False)
    assert again.fits
    assert again.plan is not None
    assert again.plan.rule.name == again.to_json()["rule"] == "AdamW with int8 moments"
    assert "int8 moments" in again.explain()
    assert offered.peak_bytes["ssd"] == pytest.approx(again.needed_bytes["ssd"], rel=0.05)


@pytest.mark.wide
def test_where_the_ssds_limit_a_plan_it_says_what_would_spare_them(small: Path, rig: Ceilings) -> None:
    slow = replace(
        rig.drives[0], read_bytes_per_second=2e8, write_bytes_per_second=2e8, mixed_bytes_per_second=2e8, capacity_bytes=1 << 40
    )
    slow_rig = replace(rig, drives=(slow,))
    asked: dict[str, Any] = {"tokens_per_step": 1024, "sequence_length": 512}
    leanest = plan_model(small, Options(host_memory="1MiB", machine=slow_rig, **asked), here=False).needed_bytes["host"]
    found = plan_model(small, Options(host_memory=leanest + (1 << 20), machine=slow_rig, **asked), here=False)
    assert found.forecast is not None
    assert found.plan is not None
    assert found.plan.host_slots < found.plan.num_blocks
    variants = {name: alternative for alternative in found.alternatives for name in alternative.options}
    assert set(variants) == {"host_memory", "optimizer", "adapter"}
    for alternative in found.alternatives:
        assert alternative.step_seconds < found.forecast.step_seconds
        assert alternative.change in found.explain()
    host = variants["host_memory"]
    assert host.peak_bytes["host"] <= host.options["host_memory"]
    # What is promised comes true: asked with that much memory, or with those moments, the planner finds a plan as fast.
    roomy = plan_model(small, Options(host_memory=host.options["host_memory"], machine=slow_rig, **asked), here=False)
    assert roomy.forecast is not None
    assert roomy.forecast.step_seconds <= 1.02 * host.step_seconds
    asked |= variants["optimizer"].options
    fewer = plan_model(small, Options(host_memory=leanest + (1 << 20), machine=slow_rig, **asked), here=False)
    assert fewer.forecast is not None
    assert fewer.forecast.step_seconds <= 1.02 * variants["optimizer"].step_seconds


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(llama_70b(), 70_553_706_496), (gpt3_175b(), 174_604_259_328)],
)
@pytest.mark.deep
def test_the_largest_models_are_answered_in_time(tmp_path: Path, rig: Ceilings, config: Any, parameters: int) -> None:
    model = saved(tmp_path / "large", config)
    options = Options(host_memory="110GiB", machine=rig)
    loops, found = loops_in(lambda: plan_model(model / "config.json", options, here=False))
    assert loops < 1000  # some 60 to 250, tenths of a second of a core: a search that grows with the model would take hours
    assert found.parameters == parameters
    assert found.tokens_per_step == 8 * 2048
    assert found.fits or found.alternatives
    if found.forecast:
        assert found.forecast.ssd_bytes_written_per_step >= 12 * parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 2048}, "more than the 1024 positions"),
        ({"tokens_per_step": 1000, "sequence_length": 300}, "no multiple of sequence_length 300"),
        ({"tokens_per_step": -4, "sequence_length": 4}, "tokens_per_step: expected a whole number from 1"),
        ({"max_steps": 0}, "max_steps: expected a whole number from 1 to .*, found 0"),
        ({"max_steps": 10**400}, "max_steps: expected a whole number from 1 to 4611686018427387904, found 1000"),
        ({"tokens_per_step": 32 * 10**400, "sequence_length": 32}, "tokens_per_step: expected a whole number from 1 to 4611"),
        ({"tokens_per_step": 4, "sequence_length": 1}, "sequence_length: expected a whole number from 2 to .*, found 1"),
        ({"compute_dtype": "int8"}, "int8"),
        ({"optimizer": "adamw:moments=int4"}, "moments: expected float32, bfloat16 or int8, found 'int4'"),
        ({"device_memory": "1TiB"}, "rtx4090-4ssd has"),
    ],
)
def test_what_cannot_be_is_refused(small: Path, rig: Ceilings, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_model(small, Options(machine=rig, **options), here=False)


@pytest.mark.deep
def test_a_little_less_memory_costs_a_little_speed(tmp_path: Path) -> None:
    """Between large buffers and the smallest chunks a step took a quarter to a third longer at once: states were read ahead by
    three small chunks, however many more there was room for.
    """
    shape = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 5504,
    }
    model = saved(tmp_path / "model", llama_small(), **shape, num_hidden_layers=24, vocab_size=32000)
    nominal = nominal_machine(2, host_bytes=8 * GIB, device_bytes=None)
    rates = {"read_bytes_per_second": 3.4e9, "write_bytes_per_second": 5e9, "mixed_bytes_per_second": 4.5e9}
    ceilings = replace(
        nominal,
        drives=(replace(nominal.drives[0], **rates),),
        flops_per_second={"bfloat16": 4e11},
        fresh_pages_share=0.75,
    )

    def seconds(host_mib: int) -> float:
        found = plan_model(
            model,
            Options(host_memory=host_mib << 20, machine=ceilings, max_grad_norm=None, tokens_per_step=256, sequence_length=256),
            here=False,
            variants_seconds=0.0,
        )
        assert found.forecast is not None
        return found.forecast.step_seconds

    assert seconds(2200) < 1.1 * seconds(2260)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma4", {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160}, "cannot be trained block by block"),
        ("cohere2_vision", {}, "computes other logits from text than its text model"),
    ],
)
def test_a_model_that_training_refuses_is_not_planned(
    name: str, changes: dict[str, Any], message: str, rig: Ceilings, tmp_path: Path
) -> None:
    """It needs an instance to be found out, a tiny one: the configuration alone looks like one that can be trained."""
    make_whole(name, **changes).config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        plan_model(tmp_path, Options(machine=rig), here=False)


@pytest.mark.wide
@pytest.mark.parametrize("measured", [False, True])
def test_a_step_that_no_machine_can_hold_is_told_by_what_it_needs(small: Path, rig: Ceilings, measured: bool) -> None:
    options = Options(
        host_memory="8GiB",
        device_memory="16GiB",
        machine=rig if measured else None,
        tokens_per_step=1 << 62,
        sequence_length=512,
    )
    found = plan_model(small, options, here=False, variants_seconds=0.5)
    assert not found.fits
    assert "memory: at least" in found.reason
    assert all(max(each.peak_bytes.values()) <= MOST_BYTES for each in found.alternatives)


@pytest.mark.parametrize("size", ["0", "-1GiB", "many"])
def test_budgets_that_cannot_be_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="host_memory"):
        Options(host_memory=size)


@pytest.mark.wide
def test_a_plan_has_the_drives_of_its_directories(small: Path, rig: Ceilings, tmp_path: Path) -> None:
    """Of four drives in the profile a run with one directory has one, and two directories on one drive are no faster."""
    directories = [tmp_path / name for name in ("one", "two")]
    for directory in directories:
        directory.mkdir()
    asked: dict[str, Any] = {"tokens_per_step": 4096, "sequence_length": 512}
    how: dict[str, Any] = {"here": False, "variants_seconds": 0.0}
    single = plan_model(small, Options(host_memory="1200MiB", machine=load_profile("rtx4090-1ssd"), **asked), **how)
    for ssd in (directories[:1], directories):
        found = plan_model(small, Options(host_memory="1200MiB", ssd=ssd, machine=rig, **asked), **how)
        assert found.forecast is not None
        assert single.forecast is not None
        assert found.forecast.step_seconds == single.forecast.step_seconds
        assert found.endurance == single.endurance
    with pytest.raises(ConfigError, match="same directory"):
        plan_model(small, Options(ssd=directories[:1] * 2, machine=rig, **asked), here=False)


def test_an_ssd_directory_that_is_none_is_refused(small: Path, rig: Ceilings, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no such directory"):
        plan_model(small, Options(ssd=[tmp_path / "nowhere"], machine=rig))
