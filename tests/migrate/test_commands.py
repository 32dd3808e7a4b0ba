"""A command line means what the same keys mean in a file; launchers, variables and other commands of its script count, too."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.migrate.migration import Migration, migrate
from headrace.terms.errors import ConfigError

COMMON: dict[str, Any] = {
    "model_name_or_path": "m",
    "dataset_name": "owner/name",
    "dataset_config": "2024",
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-4,
    "max_steps": -1,
    "bf16": False,
    "eval_strategy": "no",
    "report_to": ["wandb", "tensorboard"],
    "use_peft": True,
    "lora_target_modules": ["q_proj", "v_proj"],
    "neftune_noise_alpha": 0.0,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "output_dir": "a b/$c",
    "odd": 7,
}
OF_TRAINERS: dict[str, dict[str, Any]] = {
    "sft": {"loss_type": "nll", "packing": True, "dataset_text_field": "words"},
    "dpo": {"loss_type": ["ipo"], "beta": 0.2, "loss_weights": [1.0], "ld_alpha": 1.0},
    "kto": {"loss_type": "kto", "desirable_weight": 1.5, "sync_ref_model": False},
}


def _words(values: dict[str, Any]) -> str:
    """Return the options of a command line, in the ways that argparse takes them."""
    words = []
    for number, (key, value) in enumerate(values.items()):
        name = f"--{key.replace('_', '-')}" if number % 2 else f"--{key}"
        several = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        if value is True:
            words.append(name)
        elif len(several) == 1 and number % 3 == 0:
            words.append(shlex.quote(f"{name}={several[0]}"))
        else:
            words += [name, *(shlex.quote(str(each)) for each in several)]
    return " \\\n  ".join(words)


@pytest.fixture
def script(file: Callable[..., Path]) -> Callable[[str], Migration]:
    def migrated(text: str) -> Migration:
        return migrate(file(text, "run.sh"))

    return migrated


@pytest.mark.parametrize("trainer", OF_TRAINERS)
@pytest.mark.parametrize(
    "program", ["trl {}", "python3 -u scripts/run_{}.py", "accelerate launch --multi_gpu -m trl.scripts.{}"]
)
def test_a_command_line_is_the_same_as_a_file(
    trainer: str, program: str, file: Callable[..., Path], script: Callable[[str], Migration]
) -> None:
    values = COMMON | OF_TRAINERS[trainer]
    theirs, ours = migrate(file(json.dumps(values))), script(f"#!/bin/bash\n{program.format(trainer)} {_words(values)}\n")
    assert ours.options == theirs.options
    assert {key: reason for key, reason in ours.left_out.items() if key not in ("multi_gpu", "u")} == theirs.left_out
    assert not [note for note in ours.notes if note.startswith("loss: read as")]


def test_a_command_names_its_trainer(script: Callable[[str], Migration]) -> None:
    """Which a file without keys of its own does not."""
    found = {name: script(f"trl {name} --model_name_or_path m --dataset_name d").options.get("loss") for name in OF_TRAINERS}
    assert found == {
        "sft": None,
        "dpo": "dpo:beta=0.1,loss_type=sigmoid",
        "kto": "kto:beta=0.1,desirable_weight=1,undesirable_weight=1",
    }
    assert "beta" in script("trl sft --model_name_or_path m --dataset_name d --beta 0.3").left_out


@pytest.mark.parametrize(
    ("before", "processes"),
    [
        ("trl sft", None),
        ("trl sft --num_processes 4", 4),
        ("trl sft --accelerate_config acc.yaml", 3),
        ("accelerate launch --config_file acc.yaml sft.py", 3),
        ("accelerate launch --config_file acc.yaml --num-processes=2 sft.py", 2),
        ("accelerate launch --config_file nowhere.yaml sft.py", None),
        ("CUDA_VISIBLE_DEVICES=0,3 accelerate launch sft.py", 2),
        ("export CUDA_VISIBLE_DEVICES=0,1,2\nnohup python sft.py", 3),
        ("CUDA_VISIBLE_DEVICES=0,3 torchrun sft.py", 1),
        ("torchrun --nproc_per_node 4 --nnodes=2 sft.py", 8),
        ("torchrun --nproc_per_node gpu sft.py", None),
        ("python -m torch.distributed.run --nproc-per-node=2 sft.py", 2),
        ("deepspeed --num_gpus 2 sft.py --deepspeed zero.json", 2),
    ],
)
def test_a_step_is_that_of_all_processes(
    before: str, processes: int | None, file: Callable[..., Path], script: Callable[[str], Migration]
) -> None:
    file("num_processes: 3\nmixed_precision: bf16\n", "acc.yaml")
    found = script(f"{before} --model_name_or_path m --dataset_name d --max_length 64")
    assert found.options["tokens_per_step"] == 8 * 64 * (processes or 1)
    said = f"{processes} processes" if processes else "one GPU; multiply it"
    assert any(said in note for note in found.notes)
    assert "config_file" in found.left_out or "config_file acc.yaml --num" in before or "config_file" not in before


def test_a_file_of_options_stands_below_the_command(file: Callable[..., Path], script: Callable[[str], Migration]) -> None:
    file("model_name_or_path: m\ndataset_name: d\nlearning_rate: 3e-4\nseed: 7\nenv: {A: b}\n", "more.yaml")
    found = script("trl sft --seed 8 --config more.yaml")
    assert (found.options["learning_rate"], found.options["seed"]) == (3e-4, 8)
    assert "env" in found.left_out
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        script("trl sft --config none.yaml")


def test_other_tools_have_commands(file: Callable[..., Path], script: Callable[[str], Migration]) -> None:
    file("model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset: d\ncutoff_len: 64\n", "lf.yaml")
    assert script("FORCE_TORCHRUN=1 llamafactory-cli train lf.yaml learning_rate=1e-3").options["learning_rate"] == 1e-3
    file("base_model: m\ndatasets: [{path: d}]\nlearning_rate: 2\n", "ax.yml")
    for command in (
        "axolotl train ax.yml --learning-rate 1e-3",
        "accelerate launch -m axolotl.cli.train ax.yml --learning_rate=1e-3",
    ):
        found = script(command)
        assert (found.tool, found.options["learning_rate"]) == ("axolotl", 1e-3)


def test_what_else_a_script_says_is_named(script: Callable[[str], Migration]) -> None:
    found = script(
        "set -e\nexport WANDB_PROJECT=mine NAME=${1:-first}\ncd /work && HF_HOME=/hub trl sft --model_name_or_path m "
        "--dataset_name d --output_dir out/$NAME --mixed_precision fp16 2>&1 | tee log\npython prepare.py $NAME\n"
    )
    assert found.options["output"] == "out/first"
    assert found.left_out.keys() >= {"WANDB_PROJECT", "HF_HOME", "line 3: cd /work", "line 4: python prepare.py first"}
    assert "mixed_precision" in found.left_out
    assert not any(key.startswith(("line 1", "line 2", "line 3: tee")) for key in found.left_out)
    assert any("1 is taken as 'first'" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no commands that train were found"),
        ("echo a\nls b", "no commands that train were found .line 1: echo a; line 2: ls b."),
        ("trl sft --a b\n\ntrl dpo --a b", "2 commands that train were found .line 1: trl sft --a ...; line 3: trl dpo --a"),
        ("trl grpo --model_name_or_path m", "line 1: trl grpo .*: grpo is not translated by this version"),
        ("axolotl inference a.yml", "no commands that train"),
        ("axolotl merge-lora a.yml", "merge-lora is not translated"),
        ("accelerate launch train.py --lr 1", "a script of its own is not read"),
        ("accelerate launch orpo.py --lr 1", "a script of its own is not read"),
        ("trl sft stray --model_name_or_path m", "'stray' belongs to no option"),
        ("trl sft --model_name_or_path --dataset_name d", "model_name_or_path: has no value"),
        ("trl sft --model_name_or_path m --dataset_name d --num_processes 0", "num_processes: .* is no number of processes"),
        ("trl sft --model_name_or_path m --dataset_name d --loss_type dft", "loss_type: 'dft' is not trained"),
        ("trl sft --model_name_or_path m --dataset_name d --learning_rate 1 2", "a value is not of the type"),
        ("trl sft --model_name_or_path $MODEL", r"line 1: '\$MODEL' is not set before"),
    ],
)
def test_what_is_not_translated_is_refused(text: str, words: str, script: Callable[[str], Migration]) -> None:
    with pytest.raises(ConfigError, match=rf"run\.sh: .*{words}"):
        script(text)


def test_another_tool_than_the_commands_is_refused(file: Callable[..., Path]) -> None:
    path = file("trl sft --model_name_or_path m --dataset_name d", "run.sh")
    assert migrate(path, "trl").tool == "trl"
    with pytest.raises(ConfigError, match="one of trl, not of axolotl"):
        migrate(path, "axolotl")
    with pytest.raises(ConfigError, match="'word' is no trainer"):
        migrate(path, "word")
