"""Options: units, keys, values, YAML there and back.

Run: pytest tests/runs/test_run_config.py
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.files.yaml_options import from_yaml, parse_changes, to_yaml
from headrace.runs import RunOptions
from headrace.terms.errors import ConfigError
from headrace.update import optimizer_of

NEEDED = {"model": "m", "data": "d.jsonl"}


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("16G", 16 << 30), ("16GiB", 16 << 30), ("16gb", 16 * 10**9), ("1.5 GiB", 3 << 29), (4096, 4096)]
)
def test_sizes_are_understood(text: object, num_bytes: int) -> None:
    assert RunOptions.of(NEEDED | {"host_memory": text}).host_memory == num_bytes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"host_memory": "sixteen"}, ["host_memory", "'sixteen' is not a size"]),
        ({"learning_rat": 1}, ["'learning_rat'", "'learning_rate'"]),
        ({"lr": 1}, ["'lr'", "'learning_rate'"]),
        ({"output-dir": "x"}, ["'output-dir'", "'output'"]),
        ({"xyzzy": 1}, ["'xyzzy'", "keys are known"]),
        ({"max_steps": 0}, ["max_steps", "0"]),
        ({"learning_rate": "fast"}, ["learning_rate", "'fast'"]),
        ({"learning_rate": float("nan")}, ["learning_rate", "nan"]),
        ({"epochs": float("inf")}, ["epochs", "inf"]),
        ({"epochs": float("nan")}, ["epochs", "nan"]),
        ({"epochs": 1e308}, ["epochs", "1000000000"]),
        ({"compute_dtype": "int8"}, ["compute_dtype", "'int8'", "bfloat16"]),
        ({"compute_dtype": ["bf16"]}, ["compute_dtype", "bf16"]),
        ({"optimizer": "adamw:eps"}, ["optimizer", "'eps' has no value"]),
        ({"lr_schedule": "step"}, ["lr_schedule", "'step'", "cosine"]),
        ({"report_to": "comet"}, ["report_to", "'comet'", "tensorboard"]),
        ({"sequence_length": 100, "tokens_per_step": 250}, ["tokens_per_step: 250", "sequence_length 100", "use 200"]),
        ({"parameter_groups": [{"patern": "x"}]}, ["parameter_groups.0", "patern"]),
        ({"parameter_groups": [{"pattern": "("}]}, ["pattern", "'('", "no regular expression"]),
        ({"parameter_groups": [{"pattern": "x", "learning_rate_scale": float("nan")}]}, ["learning_rate_scale", "nan"]),
        ({"parameter_groups": [{"pattern": "x", "weight_decay": -0.1}]}, ["weight_decay", "-0.1"]),
        ({"weight_decay": float("inf")}, ["weight_decay", "inf"]),
        ({"adam_betas": [0.9, 0.95]}, ["'adam_betas'", "'optimizer'"]),
        ({"optimizer": ["adamw"]}, ["optimizer", "adamw", "expected a text"]),
        ({"max_grad_norm": float("nan")}, ["max_grad_norm", "nan"]),
    ],
)
def test_what_is_not_understood_is_named_in_one_line(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        RunOptions.of(NEEDED | change, source="run.yaml")
    message = str(caught.value)
    assert message.startswith("run.yaml: ")
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="model is missing"):
        RunOptions.of({"data": "x"})


def test_short_names_of_dtypes_and_single_paths() -> None:
    config = RunOptions.of(NEEDED | {"compute_dtype": "bf16", "ssd": "/a"})
    assert (config.compute_dtype, config.ssd, config.data) == ("bfloat16", (Path("/a"),), ("d.jsonl",))


@given(
    learning_rate=st.floats(0, 1),
    tokens=st.integers(1, 64).map(lambda rows: rows * 128),
    seed=st.integers(0, 2**32),
    ssd=st.lists(st.sampled_from(["/a", "/b c", "/ü"]), unique=True),
    packing=st.none() | st.booleans(),
    clip=st.none() | st.floats(0, 10),
)
def test_yaml_there_and_back_is_the_same(tmp_path_factory: pytest.TempPathFactory, tokens: int, **values: object) -> None:
    values = {"ssd": values.pop("ssd"), "max_grad_norm": values.pop("clip")} | values
    config = RunOptions.of(NEEDED | values | {"tokens_per_step": tokens, "sequence_length": 128, "host_memory": "3GiB"})
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert from_yaml(path) == config


def test_changes_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: [a.jsonl, b.jsonl]\nlearning_rate: 1e-5\n")
    changes = parse_changes(["learning-rate=3e-4", "ssd=[/a, /b]", "packing=false", "output=runs/x=y"])
    config = from_yaml(path, changes)
    assert (config.learning_rate, config.packing, config.output) == (3e-4, False, Path("runs/x=y"))
    assert config.ssd == (Path("/a"), Path("/b"))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), ("a: [1", "not YAML"), ("- 1\n", "found a list"), ("model: m\ndatas: x\n", "'data'")],
)
def test_unusable_files_are_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        from_yaml(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("model: m\ndata: d\nseed: 1\n'seed': 1\n", "'seed' stands twice, in lines 3 and 4"),
        ("model: m\ndata: d\nparameter_groups:\n- pattern: x\n  weight_decay: 0\n  pattern: y\n", "'pattern' .* lines 4 and 6"),
        ("{model: m, data: d, seed: 1, seed: 2}", "'seed' stands twice, in line 1"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"^{path}: {words}.*; keep one of them$"):
        from_yaml(path)


def test_a_key_that_stands_twice_in_a_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parameter_groups=.*: 'pattern' stands twice"):
        parse_changes(["parameter_groups=[{pattern: x, pattern: y}]"])


def test_what_is_merged_into_a_mapping_is_no_second_key(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\ndata: d\nparameter_groups:\n- &first {pattern: x, weight_decay: 0.1}\n"
        "- &second {<<: *first, pattern: y}\n- {<<: *second, pattern: z}\n"
    )
    groups = from_yaml(path).parameter_groups
    assert [(group.pattern, group.weight_decay) for group in groups] == [("x", 0.1), ("y", 0.1), ("z", 0.1)]


def test_words_without_an_equals_sign_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected key=value"):
        parse_changes(["fast"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("9" * 5000, "more than 4300 digits"),
        ("2026-02-31", "day"),
        ("!!bool perhaps", "its tag"),
        ("[" * 3000, "too deep"),
    ],
)
def test_values_that_yaml_itself_does_not_refuse_are_refused_in_one_line(tmp_path: Path, value: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: m\nmax_steps: {value}\n")
    with pytest.raises(ConfigError, match=f"not YAML .*{words}") as from_a_file:
        from_yaml(path)
    with pytest.raises(ConfigError, match=f"max_steps=.*not YAML .*{words}") as from_a_word:
        parse_changes([f"max_steps={value}"])
    assert all("\n" not in str(caught.value) and len(str(caught.value)) < 400 for caught in (from_a_file, from_a_word))


@pytest.mark.parametrize("value", ["9" * 4000, "0x" + "f" * 5000, "[0x" + "f" * 5000 + "]"])
@pytest.mark.parametrize("key", ["max_steps", "tokens_per_step", "seed", "warmup_steps", "sequence_length", "learning_rate"])
def test_numbers_that_no_computation_can_hold_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        RunOptions.of(NEEDED | parse_changes([f"{key}={value}"]))
    assert len(str(caught.value)) < 400


def test_parameter_groups_reach_the_optimizer() -> None:
    config = RunOptions.of(
        NEEDED | {"parameter_groups": [{"pattern": "embed", "learning_rate_scale": 0.1}], "weight_decay": 0.1}
    )
    assert optimizer_of(config).group_of("model.embed_tokens.weight", 2) == (0.1, 0.1)
    assert optimizer_of(config).group_of("model.norm.weight", 1) == (1.0, 0.0)
