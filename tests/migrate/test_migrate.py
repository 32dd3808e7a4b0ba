"""What another trainer's file asks for is what `run.yaml` says, or is named with a reason; nothing is lost without a word."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli import main
from headrace.files.yaml_options import from_yaml
from headrace.migrate import TOOLS, migrate
from headrace.migrate.source import MigratedFile
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import RunOptions

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: json
    data_files: more.jsonl
    type: completion
val_set_size: 0.1
output_dir: ./outputs/out
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 3
optimizer: adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
warmup_ratio: 0.1
evals_per_epoch: 4
weight_decay: 0.01
special_tokens:
  pad_token: <|end_of_text|>
frobnicate: 7
"""
LLAMA_FACTORY = """
model_name_or_path: models/qwen
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine, unknown
dataset_dir: {folder}
cutoff_len: 1024
output_dir: saves/out
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
val_size: 0.05
plot_loss: true
"""
TRL = """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
use_peft: true
lora_r: 32
lora_alpha: 16
use_rslora: true
optim: sgd
max_steps: 200
warmup_ratio: 0.1
packing: true
"""
DEEPSPEED = {
    "train_batch_size": 16,
    "bf16": {"enabled": True},
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_min_lr": 0}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme0"},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme1"},
    },
    "aio": {"block_size": 1048576},
}


def test_axolotl(file: Callable[..., Path]) -> None:
    found = migrate(file(AXOLOTL))
    assert found.tool == "axolotl"
    assert found.options == {
        "model": "NousResearch/Llama-3.2-1B",
        "data": ["teknium/GPT4-LLM-Cleaned", "more.jsonl"],
        "output": "./outputs/out",
        "sequence_length": 2048,
        "tokens_per_step": 4 * 2 * 2048,
        "optimizer": "adamw:beta2=0.999,moments=int8",
        "adapter": "lora:rank=16,alpha=32,dropout=0.05,target_modules=q_proj+v_proj",
        "learning_rate": 2e-4,
        "weight_decay": 0.01,
        "lr_schedule": "cosine",
        "compute_dtype": "bfloat16",
        "seed": 42,
        "epochs": 3.0,
        "packing": True,
        "eval_split": 0.1,
    }
    assert set(found.left_out) == {
        "load_in_4bit",
        "gradient_checkpointing",
        "warmup_ratio",
        "evals_per_epoch",
        "special_tokens",
        "frobnicate",
    }
    assert found.left_out["frobnicate"] == "unknown to this version"
    assert "headrace compress MODEL OUT --to int4" in found.left_out["load_in_4bit"]


def test_llama_factory(file: Callable[..., Path], tmp_path: Path) -> None:
    info = {"mine": {"file_name": "mine.json", "formatting": "sharegpt", "columns": {"messages": "conversations"}}}
    file(json.dumps(info), "dataset_info.json")
    found = migrate(file(LLAMA_FACTORY.format(folder=tmp_path)))
    assert found.tool == "llama-factory"
    assert found.options["data"] == [str(tmp_path / "mine.json"), "unknown"]
    assert any("unknown is a name of" in note for note in found.notes)
    assert found.options["adapter"] == "lora:rank=8,alpha=16,target_modules=all-linear"
    assert found.options["tokens_per_step"] == 8 * 1024
    assert found.options["warmup_steps"] == 20
    assert found.options["optimizer"] == "adamw:beta2=0.999"
    assert found.options["eval_split"] == 0.05


def test_trl(file: Callable[..., Path]) -> None:
    """What it leaves out has TRL's defaults; a warm-up of a share of known steps becomes steps."""
    found = migrate(file(TRL))
    assert found.tool == "trl"
    assert found.options["sequence_length"] == 1024
    assert found.options["tokens_per_step"] == 8 * 1024
    assert found.options["learning_rate"] == 2e-5
    assert found.options["epochs"] == 3.0
    assert found.options["max_steps"] == 200
    assert found.options["warmup_steps"] == 20
    assert found.options["lr_schedule"] == "linear"
    assert found.options["optimizer"] == "sgd:momentum=0"
    name, _, settings = found.options["adapter"].partition(":")
    values = dict(word.split("=") for word in settings.split(","))
    # rsLoRA multiplies by alpha / sqrt(rank), LoRA by alpha / rank.
    assert float(values["alpha"]) / 32 == pytest.approx(16 / 32**0.5, rel=1e-5)
    assert (name, values["dropout"]) == ("lora", "0.05")


@pytest.mark.parametrize(
    "text",
    [
        AXOLOTL + "streaming: true\nstreaming_multipack_buffer_size: 500\nmax_steps: 9\n",
        LLAMA_FACTORY + "streaming: true\nbuffer_size: 500\nmax_steps: 9\n",
        TRL + "dataset_streaming: true\n",
    ],
)
def test_data_that_are_read_as_they_come(text: str, file: Callable[..., Path]) -> None:
    found = migrate(file(text))
    assert found.options["streaming"] is True
    assert found.options.get("buffer_size") == (500 if "500" in text else None)


def test_trl_dpo(file: Callable[..., Path]) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nloss_type: [ipo]\nbeta: 0.2\nmax_prompt_length: 512\n"
    found = migrate(file(text + "per_device_train_batch_size: 4\nlabel_smoothing: 0.0\nf_divergence_type: reverse_kl\n"))
    assert found.options["loss"] == "dpo:beta=0.2,loss_type=ipo"
    assert found.options["tokens_per_step"] == 4 * 2 * 1024
    assert found.options["learning_rate"] == 1e-6
    assert "max_prompt_length" in found.left_out
    assert any("trl dpo" in note for note in found.notes)


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ("rl: dpo\n", "dpo:beta=0.1,loss_type=sigmoid"),
        ("rl: ipo\nrl_beta: 0.2\n", "dpo:beta=0.2,loss_type=ipo"),
        ("rl: orpo\norpo_alpha: 0.3\n", "orpo:beta=0.3"),
        ("rl: kto\nkto_undesirable_weight: 0.2\n", "kto:beta=0.1,desirable_weight=1,undesirable_weight=0.2"),
    ],
)
def test_axolotl_preferences(words: str, loss: str, file: Callable[..., Path]) -> None:
    text = f"base_model: m\nsequence_len: 256\nmicro_batch_size: 4\ndatasets: [{{path: d}}]\n{words}"
    found = migrate(file(text))
    assert found.options["loss"] == loss
    assert found.options["tokens_per_step"] == 4 * 2 * 256
    assert any("4 pairs of rows of 256 tokens" in note for note in found.notes)
    assert "rl" not in found.left_out


def test_trl_kto(file: Callable[..., Path]) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nbeta: 0.2\ndesirable_weight: 1.5\nper_device_train_batch_size: 4\n"
    found = migrate(file(text))
    assert found.options["loss"] == "kto:beta=0.2,desirable_weight=1.5,undesirable_weight=1"
    assert found.options["tokens_per_step"] == 4 * 2 * 1024
    with pytest.raises(ConfigError, match="apo_zero_unpaired' is not trained"):
        migrate(file(text + "loss_type: apo_zero_unpaired\n"))


@pytest.mark.parametrize(
    ("words", "loss"),
    [
        ("", "dpo:beta=0.1,loss_type=sigmoid"),
        ("pref_loss: hinge\npref_beta: 0.3\n", "dpo:beta=0.3,loss_type=hinge"),
        ("dpo_label_smoothing: 0.1\n", "dpo:beta=0.1,loss_type=sigmoid,label_smoothing=0.1"),
        ("pref_loss: orpo\n", "orpo:beta=0.1"),
        ("pref_loss: simpo\npref_beta: 2\nsimpo_gamma: 0.5\n", "simpo:beta=2,gamma=0.5"),
    ],
)
def test_llama_factory_preferences(words: str, loss: str, file: Callable[..., Path], tmp_path: Path) -> None:
    columns = {"prompt": "question", "chosen": "chosen", "rejected": "worse"}
    file(json.dumps({"mine": {"file_name": "mine.json", "ranking": True, "columns": columns}}), "dataset_info.json")
    text = f"model_name_or_path: m\nstage: dpo\ncutoff_len: 512\ndataset: mine\ndataset_dir: {tmp_path}\n{words}"
    found = migrate(file(text))
    assert found.options["loss"] == loss
    (row,) = found.options["data"]
    assert row == {"path": str(tmp_path / "mine.json"), "columns": {"prompt": "question", "rejected": "worse"}}
    assert found.options["tokens_per_step"] == 8 * 2 * 512
    with pytest.raises(ConfigError, match="has pairs to rank, and the file asks for another task"):
        migrate(file(text.replace("stage: dpo", "stage: sft")))


def test_deepspeed(file: Callable[..., Path]) -> None:
    """It has neither model nor data: these stand as comments."""
    found = migrate(file(json.dumps(DEEPSPEED), "ds.json"))
    assert found.options == {
        "ssd": ["/nvme0", "/nvme1"],
        "max_steps": 100,
        "optimizer": "adamw:beta2=0.99",
        "learning_rate": 1e-4,
        "weight_decay": 0.1,
        "warmup_steps": 10,
        "lr_schedule": "linear",
        "max_grad_norm": 0.5,
        "compute_dtype": "bfloat16",
    }
    assert "# model:\n# data:\n" in found.to_yaml()
    assert set(found.left_out) >= {"train_batch_size", "zero_optimization.stage", "aio.block_size"}


@pytest.mark.parametrize("text", [AXOLOTL, TRL, LLAMA_FACTORY.format(folder="data")], ids=["axolotl", "trl", "llama-factory"])
def test_what_is_written_is_read_as_the_same_options(text: str, file: Callable[..., Path]) -> None:
    found = migrate(file(text))
    assert from_yaml(file(found.to_yaml(), "run.yaml")) == RunOptions.of(found.options)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base_model: m\nrl: simpo", "rl: 'simpo' is not trained by this version"),
        ("base_model: m\nadapter: ia3", "adapter: 'ia3' is not an adapter that this version trains"),
        ("base_model: m\nqat: {weight_dtype: int8}", "qat: .* is not trained by this version"),
        ("model_name_or_path: m\nstage: ppo\ncutoff_len: 3", "stage: 'ppo' is not trained"),
        ("model_name_or_path: m\nfinetuning_type: oft", "finetuning_type: 'oft' is not trained"),
        ("model_name_or_path: m\ndataset_name: d\nreward_funcs: f", "reward_funcs: 'f' belongs to a trainer of TRL's that"),
        ("model_name_or_path: m\ndataset_name: d\nloss_type: robust", "loss_type: 'robust' is not trained by this version"),
        ("model_name_or_path: m\ndataset_name: d\nbeta: 0.1\nrpo_alpha: 1", "rpo_alpha: 1 changes the loss"),
        ("model_name_or_path: m\nstage: dpo\npref_loss: kto_pair", "pref_loss: 'kto_pair' is not trained"),
        ("base_model: m\nmicro_batch_size: many", "a value is not of the type that axolotl has there"),
        ("learning_rate: 3", "no keys of axolotl, llama-factory, trl, deepspeed were found"),
        ("[1, 2", "not YAML"),
    ],
)
def test_what_would_train_something_else_is_refused(text: str, words: str, file: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=words):
        migrate(file(text))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(0, 10), st.text("abc:0,[", max_size=6))
KEYS = sorted(
    {line.partition(":")[0] for text in (AXOLOTL, LLAMA_FACTORY, TRL) for line in text.splitlines() if line[:1].isalpha()}
)


@given(st.dictionaries(st.sampled_from(KEYS), SCALARS), st.sampled_from(sorted(TOOLS)))
def test_each_key_becomes_an_option_a_reason_or_a_refusal(values: dict[str, Any], tool: str) -> None:
    """Whatever stands there; keys that are off or empty may be passed over."""
    source = MigratedFile(values)
    try:
        TOOLS[tool].translate(source)
    except (ConfigError, TypeError, ValueError, KeyError, AttributeError):  # `migrate` says these in one line
        return
    told = " ".join([*source.origins.values(), *source.left_out, *source.notes])
    off = (None, False, "", 0, 0.0)
    dealt_with = {"do_train", "use_peft", "finetuning_type", "adapter", "stage", "gradient_accumulation_steps", "dataset_dir"}
    for key, value in values.items():
        zero = isinstance(value, str) and not value.strip("0")  # the text of a number that is off
        quiet = (
            zero
            or value in off
            or key in dealt_with
            or key.startswith("lora_")
            or key in ("use_rslora", "max_steps", "save_steps")
        )
        assert quiet or key in told, key


def test_the_command_says_what_became_of_each_key(
    file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(["migrate", *map(str, words)])
        done = capsys.readouterr()
        return int(left.value.code or 0), done.out, done.err

    theirs, ours = file(AXOLOTL), tmp_path / "run.yaml"
    code, out, _ = run(theirs, "--output", ours)
    assert (code, "left out frobnicate" in out) == (0, True)
    assert yaml.safe_load(ours.read_text())["learning_rate"] == 2e-4
    code, _, error = run(theirs, "--output", ours)
    assert (code, "is there already; name another with --output" in error) == (2, True)
    code, out, _ = run(theirs, "--json")
    assert (code, json.loads(out)["options"]["seed"]) == (0, 42)
