"""The forms of data that TRL's SFTTrainer takes, packing, adapters of PEFT, data collators.

Run: pytest tests/integrations/test_trainer_data.py
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tiers import sampled
from trainers import TEXTS, USUAL, Make, logged, weights
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

from headrace.data.values.values import IGNORED
from headrace.integrations.transformers import HeadraceTrainer
from headrace.integrations.transformers.rows import TokenRows
from headrace.terms.errors import ConfigError, DataError

TALK = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "me"}]


@dataclass
class SFTConfig(TrainingArguments):
    """The fields of TRL 1.16's SFTConfig that decide numbers, with its defaults."""

    max_length: int | None = 1024
    packing: bool = False
    eval_packing: bool | None = None
    dataset_text_field: str = "text"
    assistant_only_loss: bool = False
    completion_only_loss: bool | None = None
    eos_token: str | None = None
    chat_template_path: str | None = None
    loss_type: str = "nll"
    packing_strategy: str = "bfd"
    shuffle_dataset: bool = False
    router_aux_loss_coef: float | None = None


def rows_of(talking: Path, tmp_path: Path, data: Any, **given: Any) -> TokenRows:
    kind = SFTConfig if set(given) - {"sequence_length"} else TrainingArguments
    length = {"sequence_length": given.pop("sequence_length")} if "sequence_length" in given else {}
    args = kind(output_dir=str(tmp_path / "run"), report_to=[], **given)
    trainer = HeadraceTrainer(talking, args, train_dataset=data, cache=tmp_path / "cache", **length)
    return trainer.train_dataset


def shown(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """Return the text of a row, and that of its targets."""
    labels = np.asarray(row["labels"])
    return tokenizer.decode(row["input_ids"]), tokenizer.decode(labels[labels != IGNORED])


@pytest.mark.parametrize(
    ("row", "given", "whole", "targets"),
    [
        ({"text": "a b"}, {}, "a b<eos>", " b<eos>"),
        ({"words": "a b"}, {"dataset_text_field": "words"}, "a b<eos>", " b<eos>"),
        ({"prompt": "who", "completion": " me"}, {}, "who me<eos>", " me<eos>"),
        ({"prompt": "who", "completion": " me"}, {"completion_only_loss": False}, "who me<eos>", "ho me<eos>"),
        ({"messages": TALK}, {}, "<user>who<eos><assistant>me<eos>", "ssistant>me<eos>"),
        ({"messages": TALK}, {"max_length": 1024}, "<user>who<eos><assistant>me<eos>", "user>who<eos><assistant>me<eos>"),
        ({"messages": TALK}, {"assistant_only_loss": True}, "<user>who<eos><assistant>me<eos>", "ssistant>me<eos>"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, {}, "<user>who<eos><assistant>me<eos>", "ssistant>me<eos>"),
        ({"input_ids": [70, 71, 72]}, {}, None, 2),
        ({"input_ids": [70, 71, 72], "labels": [-100, -100, 72]}, {}, None, 1),
        ({"input_ids": [70, 71, 72], "completion_mask": [0, 0, 1]}, {"max_length": 1024}, None, 1),
        ({"input_ids": [70, 71, 72], "completion_mask": [0, 0, 1]}, {"completion_only_loss": False}, None, 2),
        ({"input_ids": [70, 71, 72], "assistant_masks": [0, 0, 1]}, {"completion_only_loss": False}, None, 1),
    ],
)
def test_forms_of_data_have_the_tokens_and_targets_that_sft_trainer_gives(
    talking: Path, tmp_path: Path, row: dict, given: dict, whole: str | None, targets: str | int
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(talking)
    for data in (Dataset.from_list([row]), [row]):
        (found,) = rows_of(talking, tmp_path, data, **given)
        if whole is None:
            assert (found["labels"] != IGNORED).sum() == targets
        else:
            assert shown(found, tokenizer) == (whole, targets)


@pytest.mark.parametrize(
    ("row", "given", "words"),
    [
        ({"prompt": TALK[:1], "completion": [TALK[1], *TALK]}, {"max_length": 64}, "its completion has 3 messages, and"),
        (
            {"prompt": TALK[:1], "completion": TALK[1:]},
            {"completion_only_loss": False, "assistant_only_loss": True},
            "give both as one conversation, in a column messages",
        ),
        ({"text": "a b"}, {"assistant_only_loss": True}, "assistant_only_loss takes conversations, and this is a text"),
        ({"prompt": "a", "completion": "b"}, {"assistant_only_loss": True}, "assistant_only_loss takes conversations"),
    ],
)
def test_rows_of_which_sft_trainer_would_train_other_tokens_are_refused(
    talking: Path, tmp_path: Path, row: dict, given: dict, words: str
) -> None:
    """Also where the tokens are kept from other arguments."""
    usual = {"prompt": TALK[:1], "completion": TALK[1:]} if isinstance(row.get("completion"), list) else row
    rows_of(talking, tmp_path, [usual, row])
    with pytest.raises(DataError, match=rf"^train_dataset, row [01]: .*{words}"):
        rows_of(talking, tmp_path, [usual, row], **given)


def test_completions_of_several_turns_are_trained_as_is_asked(talking: Path, tmp_path: Path) -> None:
    tokenizer, row = AutoTokenizer.from_pretrained(talking), {"prompt": TALK[:1], "completion": [TALK[1], *TALK]}
    whole = "<user>who<eos><assistant>me<eos>" * 2
    (found,) = rows_of(talking, tmp_path, [row], assistant_only_loss=True)
    assert shown(found, tokenizer) == (whole, "ssistant>me<eos>" * 2)
    (found,) = rows_of(talking, tmp_path, [row], completion_only_loss=False)
    assert shown(found, tokenizer) == (whole, whole[1:])


def test_a_data_set_is_shuffled_by_seed_if_that_is_asked_for(talking: Path, tmp_path: Path, texts: Dataset) -> None:
    found = rows_of(talking, tmp_path, texts, shuffle_dataset=True, seed=5)
    expected = rows_of(talking, tmp_path, texts.shuffle(seed=5))
    assert [row["input_ids"].tolist() for row in found] == [row["input_ids"].tolist() for row in expected]
    with pytest.raises(DataError, match=r"^train_dataset: shuffle_dataset takes a data set of `datasets`, found list"):
        rows_of(talking, tmp_path, [{"text": "a"}], shuffle_dataset=True)


def test_rows_are_cut_where_they_are_asked_to_be(talking: Path, tmp_path: Path, texts: Dataset) -> None:
    assert rows_of(talking, tmp_path, texts, sequence_length=16).longest == 16
    assert rows_of(talking, tmp_path, texts, max_length=12).longest == 12
    longest = rows_of(talking, tmp_path, texts).longest
    assert longest == max(len(row["input_ids"]) for row in rows_of(talking, tmp_path, texts)) <= 64


@pytest.mark.wide
def test_packed_rows_have_the_loss_of_their_samples(talking: Path, tmp_path: Path, texts: Dataset) -> None:
    """A first loss by plain transformers, one sample at a time; then the run goes on."""
    args = SFTConfig(output_dir=str(tmp_path / "run"), **{**USUAL, "max_steps": 2}, packing=True, max_length=64)
    with HeadraceTrainer(talking, args, train_dataset=texts, eval_dataset=texts, cache=tmp_path / "c") as trainer:
        assert len(trainer.train_dataset) < len(texts)
        found = trainer.evaluate()["eval_loss"]
        assert trainer.train().global_step == 2
        assert trainer.plan.batch.sequence_length == 64
    model, total, tokens = AutoModelForCausalLM.from_pretrained(talking).requires_grad_(False), 0.0, 0
    for row in rows_of(talking, tmp_path, texts, sequence_length=64):
        ids = torch.tensor(row["input_ids"])[None]
        count = ids.shape[1] - 1
        total, tokens = total + float(model(ids, labels=ids).loss) * count, tokens + count
    assert found == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.wide
@pytest.mark.parametrize("dora", sampled([False, True], [False]))
def test_adapters_of_peft_learn_as_under_stock_trainer(make: Make, talking: Path, tmp_path: Path, dora: bool) -> None:
    """From the same first adapters: those of PEFT begin at random, so they are given those of the run."""
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "use_dora": dora, "task_type": "CAUSAL_LM"}
    asked = {"weight_decay": 0.1, "learning_rate": 1e-2}
    trainer = make(peft_config=LoraConfig(**config), **asked)
    trainer.save_model(str(tmp_path / "first"))
    trainer.train()
    trainer.save_model(str(tmp_path / "last"))
    base = AutoModelForCausalLM.from_pretrained(talking)
    model = PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True)
    assert {name for name, each in trainer.model.named_parameters() if each.requires_grad} == {
        name for name, each in model.named_parameters() if each.requires_grad
    }
    args = TrainingArguments(output_dir=str(tmp_path / "stock"), **{**USUAL, **asked})
    stock = Trainer(model, args, data_collator=trainer.data_collator, train_dataset=trainer.train_dataset)
    stock.train()
    for name in ("loss", "grad_norm"):
        assert logged(trainer, name) == pytest.approx(logged(stock, name), rel=1e-3), name
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = weights(tmp_path / "last"), weights(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-3, atol=1e-4), name


def test_what_of_a_lora_config_is_not_done_is_named(make: Make) -> None:
    for given in ({"bias": "all"}, {"use_rslora": True}, {"modules_to_save": ["lm_head"]}):
        (name,) = given
        with pytest.raises(ConfigError, match=rf"^peft_config: {name}=.* is not done by the engine"):
            make(peft_config=LoraConfig(**given))


@pytest.mark.wide
def test_batches_of_a_data_collator_are_taken_as_they_are(make: Make, talking: Path, tmp_path: Path) -> None:
    """As scripts for stock Trainer have it: a tokenised data set, and the collator for language models."""
    tokenizer = AutoTokenizer.from_pretrained(talking)
    data = Dataset.from_list([{"text": text} for text in TEXTS]).map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=24), remove_columns=["text"]
    )
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    trainer = make(train_dataset=data, data_collator=collator)
    trainer.train()
    args = TrainingArguments(output_dir=str(tmp_path / "stock"), **USUAL)
    stock = Trainer(AutoModelForCausalLM.from_pretrained(talking), args, data_collator=collator, train_dataset=data)
    stock.train()
    assert logged(trainer, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-4)
    assert trainer.plan.batch.sequence_length == max(len(row["input_ids"]) for row in data)


def test_data_without_a_length_or_without_targets_are_refused(make: Make, texts: Dataset) -> None:
    with pytest.raises(DataError, match=r"^train_dataset: a IterableDataset has no length"):
        make(train_dataset=texts.to_iterable_dataset())
    with pytest.raises(DataError, match=r"^train_dataset, row 0: nothing to train on in the columns 'words'"):
        make(train_dataset=texts.rename_column("text", "words"))
    bare = {"data_collator": lambda rows: {"input_ids": torch.ones(2, 3, dtype=torch.int64)}, "sequence_length": 8}
    with pytest.raises(DataError, match="data_collator: its batches have no labels"):
        make(**bare, remove_unused_columns=False).train()


@pytest.mark.deep
def test_own_groups_of_an_optimizer_are_taken(make: Make, talking: Path, tmp_path: Path) -> None:
    """Rates by layer, as scripts give them by `create_optimizer`: embeddings learn slower, norms are decayed."""

    def groups(model: Any) -> list[dict[str, Any]]:
        slow = [each for name, each in model.named_parameters() if "embed" in name]
        others = [each for name, each in model.named_parameters() if "embed" not in name]
        return [{"params": others, "lr": 1e-3, "weight_decay": 0.1}, {"params": slow, "lr": 1e-4, "weight_decay": 0.0}]

    class Own(HeadraceTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.AdamW(groups(self.model), betas=(0.8, 0.99))
            return self.optimizer

    trainer = make(kind=Own)
    trainer.train()
    model = AutoModelForCausalLM.from_pretrained(talking)
    args = TrainingArguments(output_dir=str(tmp_path / "stock"), **USUAL)
    optimizer = torch.optim.AdamW(groups(model), betas=(0.8, 0.99))
    given = {"data_collator": trainer.data_collator, "train_dataset": trainer.train_dataset, "optimizers": (optimizer, None)}
    stock = Trainer(model, args, **given)
    stock.train()
    trainer.save_model(str(tmp_path / "ours"))
    assert logged(trainer, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-4)
    state = model.state_dict()
    for name, tensor in weights(tmp_path / "ours").items():
        assert torch.allclose(tensor, state[name], rtol=1e-4, atol=2e-5), name
