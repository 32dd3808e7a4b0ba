"""`headrace plan` and `headrace bench machine` on the command line: output, exit codes, where the profile is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from planned_models import llama_small, saved
from tiers import sampled
from typer.testing import CliRunner, Result

from headrace.cli.app import app
from headrace.cli.configuration import plan_options_of
from headrace.cli.planning import make_report
from headrace.measure.kept import Wanted, keep
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import ModelError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.declared import Declaration
from headrace.terms.options.method_options import DTYPE_NAMES
from headrace.terms.options.option_kinds import Day, Flag, Number, OneOf, OptionKind, PathOf, Size, Text, Whole
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.run_options import RunOptions
from headrace.update.rules.moment_planes import OTHER_NAMES


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    return saved(tmp_path / "model", llama_small())


def command_of(name: str) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.wide
def test_json_has_what_scripts_ask_for(model: Path) -> None:
    result = run("plan", model, "--machine", "rtx3090-1ssd", "--tokens-per-step", 1024, "--sequence-length", 512, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    for name in (
        "fits",
        "parameters",
        "step_seconds",
        "tokens_per_second",
        "bottleneck",
        "peak_bytes",
        "ssd_bytes_read_per_step",
        "ssd_bytes_written_per_step",
        "plan",
        "alternatives",
    ):
        assert name in values
    assert values["fits"]


STEP = {"machine": "rtx3090-1ssd", "tokens_per_step": 1024, "sequence_length": 512}


def planned(*words: object, **options: object) -> dict[str, Any]:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    result = run("plan", *words, *flags, "--json")
    assert result.exit_code == 0, result.output
    values: dict[str, Any] = json.loads(result.stdout)
    return values


@pytest.mark.wide
def test_the_file_of_a_run_is_planned_as_its_options_are(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    lines = [f"{key}: {value}" for key, value in {**STEP, "model": model, "max_steps": 7, "seed": 3}.items()]
    file.write_text("\n".join([*lines, "listen: 0.0.0.0:29500", "parameter_groups: [{pattern: norm, weight_decay: 0}]"]))
    found, expected = planned(file), planned(model, **STEP, max_steps=7)
    assert found.pop("without_effect") == ["listen", "parameter_groups", "seed"]
    assert expected.pop("without_effect") == []
    assert found == expected
    assert planned(file, "max_steps=8", max_steps=9)["num_steps"] == 9
    assert "no effect on the plan: listen, parameter_groups, seed" in run("plan", file).stdout
    file.write_text("model: m\nlearning_rat: 1\n")
    assert "did you mean 'learning_rate'?" in run("plan", file).stderr
    file.write_text("data: d.jsonl\n")
    assert "model is missing" in run("plan", file).stderr


# A value of each option that is not its default.
VALUES: dict[type[OptionKind], object] = {
    Whole: 3,
    Number: 0.5,
    Size: "8GiB",
    Day: "2026-01-02",
    PathOf: "x",
    Text: "x",
}
OWN_VALUES = {
    "router_aux_loss_coef": 0.01,
    "optimizer": "lion",
    "gradient": "lsp",
    "adapter": "lora",
    "gradient_dtype": "float32",
    "machine": "h100-1ssd",
    "sequence_length": 256,
    "tokens_per_step": 768,
    "report_to": "trace",
    "ssd": "/tmp",
    "data": "d.jsonl",
    "parameter_groups": [{"pattern": "norm"}],
    "compute_dtype": "float32",
    "cuts": [2, 5],
}


# What must be given with an option.
WITH: dict[str, dict[str, object]] = {
    "streaming": {"max_steps": 3},
    "buffer_size": {"streaming": True, "max_steps": 3},
    "reward": {"loss": "grpo"},
}


def value_of(each: Declaration) -> object:
    if isinstance(each.kind, OneOf):
        return next(name for name in each.kind.names if name != each.default)
    if isinstance(each.kind, Flag):
        return not each.default
    return OWN_VALUES.get(each.key, VALUES.get(type(each.kind), "x"))


@pytest.mark.parametrize("key", [each.key for each in RunOptions.declarations() if not each.required])
def test_plan_takes_every_option_of_train(key: str) -> None:
    """Also one that is declared tomorrow."""
    each = next(each for each in RunOptions.declarations() if each.key == key)
    value = OWN_VALUES[key] if key in OWN_VALUES else value_of(each)
    values = {key: value} | WITH.get(key, {})
    options, given = plan_options_of(["m", *(f"{name}={json.dumps(each)}" for name, each in values.items())], (), {})
    assert given == values.keys()
    assert getattr(options, key) == getattr(RunOptions.of({"model": "m", "data": "d"} | values), key)
    flags = {name for option in command_of("plan").params for name in (*option.opts, *option.secondary_opts)}
    assert each.flag is None or each.flag in flags


@pytest.mark.wide
def test_what_is_named_without_effect_changes_nothing(model: Path) -> None:
    known = {each.key: each for each in RunOptions.declarations() if not each.plan and not each.required}
    given = {key: OWN_VALUES.get(key, value_of(each)) for key, each in known.items() if key != "liger"}
    found = planned(model, *(f"{key}={json.dumps(value)}" for key, value in given.items()), **STEP)
    assert found.pop("without_effect") == sorted(given)
    expected = planned(model, **STEP)
    expected.pop("without_effect")
    assert found == expected


@pytest.mark.wide
def test_how_often_is_committed_acts(model: Path, tmp_path: Path) -> None:
    seldom, offered = (
        planned(model, **STEP, host_memory="16GiB", checkpoint_every=10),
        planned(model, **STEP, host_memory="16GiB"),
    )
    assert (seldom["plan"]["updates"]["checkpoint_every"], offered["plan"]["updates"]["checkpoint_every"]) == (10, 1)
    assert seldom["ssd_bytes_written_per_step"] < offered["ssd_bytes_written_per_step"]
    assert seldom["without_effect"] == []


@pytest.mark.wide
def test_a_plan_that_was_made_before_is_followed(model: Path, tmp_path: Path) -> None:
    given = tmp_path / "plan.json"
    given.write_text(json.dumps(planned(model, **STEP, host_memory="16GiB", checkpoint_every=10)))
    found = planned(model, machine=STEP["machine"], host_memory="16GiB", plan=given)
    assert found["plan"]["updates"]["checkpoint_every"] == 10
    assert (found["tokens_per_step"], found["sequence_length"]) == (1024, 512)
    refused = run("plan", model, "--machine", "rtx3090-1ssd", "--tokens-per-step", 512, "--plan", given)
    assert "tokens_per_step 1024 in the plan, 512 here" in refused.stderr


@pytest.mark.wide
def test_moments_are_a_setting_of_the_rule(model: Path) -> None:
    words = ("plan", model, "--machine", "rtx3090-1ssd", "--tokens-per-step", 1024, "--json", "--optimizer")
    values = [json.loads(run(*words, f"adamw:moments={moments}").stdout) for moments in ("float32", "bfloat16", "int8")]
    assert [found["plan"]["rule"]["name"] for found in values] == [
        "AdamW",
        "AdamW with bfloat16 moments",
        "AdamW with int8 moments",
    ]
    written = [found["ssd_bytes_written_per_step"] / found["parameters"] for found in values]
    assert written[0] > 12 > written[1] > 8 > written[2] > 6
    refused = run(*words[:-2], "--optimizer", "adamw:moments=int4")
    assert refused.exit_code == 2
    assert "moments: expected float32, bfloat16 or int8, found 'int4'" in refused.stderr


@pytest.mark.wide
@pytest.mark.parametrize("short", sampled(DTYPE_NAMES, ("bf16",)))
def test_what_train_calls_dtypes_plan_does_too(short: str, model: Path) -> None:
    words = ("plan", model, "--machine", "rtx3090-1ssd", "--tokens-per-step", 1024, "--json", "--compute-dtype")
    assert json.loads(run(*words, short).stdout)["plan"]["placement"]["compute_dtype"] == DTYPE_NAMES[short]


@pytest.mark.wide
@pytest.mark.parametrize("short", sampled(OTHER_NAMES, ("bf16",)))
def test_what_train_calls_moments_plan_does_too(short: str, model: Path) -> None:
    words = ("plan", model, "--machine", "rtx3090-1ssd", "--tokens-per-step", 1024, "--json", "--optimizer")
    name = OTHER_NAMES[short]
    assert json.loads(run(*words, f"adamw:moments={short}").stdout)["plan"]["rule"]["name"] == (
        "AdamW" if name == "float32" else f"AdamW with {name} moments"
    )


@pytest.mark.wide
def test_a_profile_that_is_kept_is_this_machines(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "settings" / "headrace" / "machine.json"
    kept.parent.mkdir(parents=True)
    values = load_profile("h100-1ssd").to_json() | {"name": "my rig", "has_device": False, "device_memory_bytes": 0}
    kept.write_text(json.dumps(values))
    sizes = ("--host-memory", "8GiB", "--tokens-per-step", 512, "--sequence-length", 256)
    result = run("plan", model, "--ssd", tmp_path, *sizes, "--verbose")
    assert result.exit_code == 0, result.output
    assert "my rig" in result.stdout
    assert "device" not in result.stdout.split("\n\n")[1].splitlines()[0]


@pytest.mark.wide
def test_what_a_run_measured_is_this_machines_until_there_is_a_profile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("plan", model, "--ssd", tmp_path, "--host-memory", "8GiB", "--tokens-per-step", 512, "--sequence-length", 256)
    assert "machine   nominal: no figures of this machine, so times are guesses; measure it with" in run(*words).stdout
    measured = replace(load_profile("h100-1ssd"), name="measured before a run", has_device=False, device_memory_bytes=0)
    keep(tmp_path / "cache" / "headrace", Wanted(directories=(tmp_path,), compute_dtype="bfloat16"), measured)
    assert "machine   measured before a run\n" in run(*words).stdout
    assert "machine   nominal" in run(*words, "--compute-dtype", "float32").stdout
    profile = tmp_path / "settings" / "headrace" / "machine.json"
    profile.parent.mkdir(parents=True)
    profile.write_text(json.dumps(replace(measured, name="my rig").to_json()))
    assert "machine   my rig\n" in run(*words).stdout


@pytest.mark.wide
def test_measuring_writes_the_profile_where_plans_look(model: Path, tmp_path: Path) -> None:
    result = run("bench", "machine", "--ssd", tmp_path, "--seconds", 0.5)
    assert result.exit_code == 0, result.output
    kept = tmp_path / "settings" / "headrace" / "machine.json"
    assert isinstance(load_profile(kept), Ceilings)
    for words in ("TFLOP/s", "ssd 0 read", "a commit", str(kept)):
        assert words in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--host-memory", "0"),
        ("--device-memory", "-1GiB"),
        ("--sequence-length", "2048"),
        ("--tokens-per-step", "1000", "--sequence-length", "300"),
        ("--machine", "no-such-machine"),
        ("--ssd", "/nowhere/at/all"),
        ("--max-steps", "0"),
        ("--max-grad-norm", "nan"),
        ("--max-grad-norm", "-1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model: Path, words: tuple[str, ...]) -> None:
    result = run("plan", model, *words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_an_absurd_profile_is_named_by_its_figure(model: Path, tmp_path: Path) -> None:
    values = load_profile("h100-1ssd").to_json() | {"update_bytes_per_second": -1}
    (tmp_path / "rig.json").write_text(json.dumps(values))
    result = run("plan", model, "--machine", tmp_path / "rig.json")
    assert result.exit_code == 2
    assert "update_bytes_per_second is -1" in result.stderr


@pytest.mark.parametrize("command", ["train", "plan", "generate", "eval", "compress"])
def test_a_model_that_is_not_there_is_refused_in_one_sentence(command: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
    absent, data = tmp_path / "absent", tmp_path / "data.jsonl"
    more = {"train": (data,), "plan": ("--data", data), "generate": ("--prompt", "a"), "eval": ("--data", data)}
    result = run(command, absent, *more.get(command, (tmp_path / "out",)))
    assert result.exit_code == 2
    said = f"model: {absent}: no such directory; give a model directory, a GGUF file, or OWNER/NAME of the Hub"
    assert said in " ".join(result.stderr.split())


def test_a_plan_of_passes_refuses_a_model_that_is_not_there_as_all_do(tmp_path: Path) -> None:
    options = PlanOptions.of({"model": tmp_path / "absent", "data": "data.jsonl"})
    with pytest.raises(ModelError, match=r"absent: no such directory; give a model directory"):
        make_report(options)
