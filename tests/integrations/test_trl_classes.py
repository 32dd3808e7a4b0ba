"""What becomes of TRL's own classes: `make test-trl TRL=FOLDER` runs these; without TRL they are skipped."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trainers import logged
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, TrainingArguments

from headrace.data.batches.prompt_batches import Prompt, PromptBatches
from headrace.data.values.values import DataSpec
from headrace.integrations.transformers import HeadraceTrainer, arguments
from headrace.integrations.transformers.arguments import check_arguments
from headrace.migrate import trl as files
from headrace.migrate.source import MigratedFile
from headrace.terms.errors import ConfigError

trl = pytest.importorskip("trl")


def _own_fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)} - {field.name for field in dataclasses.fields(TrainingArguments)}


def test_each_field_of_sft_config_stands_in_one_table() -> None:
    honoured, ignored, refused = arguments.SFT_HONOURED, arguments.SFT_IGNORED.keys(), arguments.SFT_REFUSED.keys()
    assert honoured | ignored | refused == _own_fields(trl.SFTConfig)
    assert honoured & ignored | honoured & refused | ignored & refused == set()


REFUSED_VALUES: dict[str, Any] = {
    "model_init_kwargs": {"revision": "older"},
    "trust_remote_code": True,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "truncation_mode": "keep_end",
    "packing_strategy": "wrapped",
    "loss_type": "dft",
}


@pytest.mark.parametrize("name", arguments.SFT_REFUSED)
def test_a_refused_field_of_sft_config_is_named(name: str, tmp_path: Path) -> None:
    args = trl.SFTConfig(output_dir=str(tmp_path / "run"), bf16=False, **{name: REFUSED_VALUES[name]})
    with pytest.raises(ConfigError, match=f"^{name}: .* is not done by HeadraceTrainer; "):
        check_arguments(args, {})


@pytest.mark.parametrize("use_cpu", [True, False])
def test_the_defaults_of_sft_config_are_taken_without_a_note(use_cpu: bool, tmp_path: Path) -> None:
    """In bfloat16, too, which without a GPU takes use_cpu."""
    precision = {"use_cpu": not torch.cuda.is_available()} if use_cpu else {"bf16": False}
    assert check_arguments(trl.SFTConfig(output_dir=str(tmp_path), **precision), {}) == []


def _others() -> Iterator[type]:
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.orpo import ORPOConfig

    yield from (trl.DPOConfig, trl.KTOConfig, trl.GRPOConfig, trl.RewardConfig, trl.RLOOConfig)
    yield from (ORPOConfig, CPOConfig, GKDConfig)


def test_other_configurations_are_refused_by_name(tmp_path: Path) -> None:
    for kind in _others():
        args = kind(output_dir=str(tmp_path / "run"), bf16=False)
        with pytest.raises(ConfigError, match=f"^args: {kind.__name__} is not trained by HeadraceTrainer"):
            check_arguments(args, {})


# How a file shows which trainer of TRL's it is for.
OF_FILES: dict[str, dict[str, Any]] = {
    "SFTConfig": {},
    "DPOConfig": {"loss_type": "sigmoid"},
    "KTOConfig": {"loss_type": "kto"},
}
# Fields that become options, and those that would train something else; all others are listed with a reason.
TAKEN = {
    "SFTConfig": {"max_length", "packing", "dataset_text_field", "chat_template_path", "router_aux_loss_coef"},
    "DPOConfig": {"beta", "loss_type", "max_length", "router_aux_loss_coef"},
    "KTOConfig": {"beta", "desirable_weight", "max_length", "undesirable_weight", "router_aux_loss_coef"},
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "SFTConfig": {"loss_type": "dft", "truncation_mode": "keep_end"},
    "DPOConfig": {
        "loss_weights": [0.5],
        "ld_alpha": 0.0,
        "f_divergence_type": "js_divergence",
        "use_weighting": True,
        "sync_ref_model": True,
        "truncation_mode": "keep_end",
    },
    "KTOConfig": {"loss_type": "apo_zero_unpaired", "sync_ref_model": True},
}
VALUES: dict[str, Any] = {
    "beta": 0.7,
    "desirable_weight": 1.25,
    "undesirable_weight": 0.75,
    "router_aux_loss_coef": 0.125,
    "max_length": 77,
    "loss_type": "hinge",
    "dataset_text_field": "words",
    "chat_template_path": "t.jinja",
    "packing": True,
}


def _translated(name: str, key: str, value: Any) -> MigratedFile:
    source = MigratedFile({"model_name_or_path": "m", "dataset_name": "d", **OF_FILES[name], key: value})
    files.translate(source)
    return source


@pytest.mark.parametrize("name", OF_FILES)
def test_migrate_says_of_each_field_what_becomes_of_it(name: str) -> None:
    for key in _own_fields(getattr(trl, name)):
        if key in OTHERWISE[name]:
            with pytest.raises(ConfigError, match=rf"^{key}: "):
                _translated(name, key, OTHERWISE[name][key])
        elif key in TAKEN[name]:
            source, without = (
                _translated(name, key, VALUES[key]),
                MigratedFile({"model_name_or_path": "m", "dataset_name": "d"}),
            )
            without.values = {**without.values, **OF_FILES[name]}
            files.translate(without)
            assert source.options != without.options, key
            assert key not in source.left_out
        else:
            reason = _translated(name, key, VALUES.get(key, True)).left_out[key]
            assert reason != "unknown to this version", key


@pytest.mark.parametrize("name", OF_FILES)
def test_migrate_knows_each_field_of_training_arguments(name: str) -> None:
    for field in dataclasses.fields(TrainingArguments):
        for value in (True, 3, "x"):
            try:
                left_out = _translated(name, field.name, value).left_out
            except (ConfigError, TypeError, ValueError, KeyError, AttributeError):
                continue
            assert left_out.get(field.name) != "unknown to this version", field.name


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture whose router's loss counts, and whose configuration has not switched it on."""
    path = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.2}
    tokens = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen3MoeConfig(**sizes, **experts, **tokens, num_key_value_heads=2, initializer_range=0.3)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(path)
    return path


def _rows(count: int) -> Dataset:
    lengths = (5, 12, 9, 7)
    return Dataset.from_list(
        [{"text": " ".join(f"w{2 + (3 * row + 5 * place) % 60}" for place in range(lengths[row % 4]))} for row in range(count)]
    )


@pytest.mark.parametrize("given", [{}, {"router_aux_loss_coef": 0.5}, {"router_aux_loss_coef": 0.0}], ids=str)
def test_a_mixture_learns_as_under_sft_trainer(given: dict[str, Any], mixture: Path, tmp_path: Path) -> None:
    """With batches of two rows, of which a step has three; the last step of an epoch has less. Held-out rows are one batch."""
    found = []
    for name in ("trl", "headrace"):
        args = trl.SFTConfig(
            output_dir=str(tmp_path / name),
            num_train_epochs=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            bf16=False,
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            use_cpu=not torch.cuda.is_available(),
            **{"learning_rate": 1e-3, "max_grad_norm": 1.0, **given},
        )
        data = {"args": args, "train_dataset": _rows(9), "eval_dataset": _rows(8)}
        if name == "trl":
            model = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
            trainer = trl.SFTTrainer(model=model, processing_class=AutoTokenizer.from_pretrained(mixture), **data)
        else:
            trainer = HeadraceTrainer(model=str(mixture), host_memory="2GiB", cache=tmp_path / "cache", **data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        found.append((before, trainer.evaluate()["eval_loss"], logged(trainer, "loss"), logged(trainer, "grad_norm")))
    trainer.close()
    (theirs_before, theirs_after, theirs, norms), (ours_before, ours_after, ours, own_norms) = found
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert own_norms == pytest.approx(norms, rel=1e-3)
    assert [ours_before, ours_after] == pytest.approx([theirs_before, theirs_after], rel=1e-4)


def test_a_coefficient_for_a_model_without_a_router_is_refused(talking: Path, tmp_path: Path) -> None:
    args = trl.SFTConfig(
        output_dir=str(tmp_path / "run"), bf16=False, router_aux_loss_coef=0.1, report_to=[], max_steps=1, eos_token="<eos>"
    )
    trainer = HeadraceTrainer(model=str(talking), args=args, train_dataset=[{"text": "a b"}], cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"^router_aux_loss_coef: 0\.1 was asked for"):
        trainer.train()


def test_grpo_takes_prompts_in_the_order_of_trls_sampler() -> None:
    from trl.trainer.utils import RepeatSampler

    sampler = RepeatSampler(range(8), mini_repeat_count=1, batch_size=4, seed=42)
    spec = DataSpec(paths=("data",), sequence_length=16, tokens_per_step=8 * 16, packing=False, seed=42)
    batches = PromptBatches([Prompt((1,), "a", {})] * 8, spec, 2, 0)
    theirs = [number for _ in range(3) for number in sampler]
    assert [int(number) for _ in range(6) for number in batches.next_batch().samples] == theirs
