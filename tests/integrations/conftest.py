"""A tiny model that reads text, a data set, and Trainers that differ in one thing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from first_plans import Plans
from talking_model import save_talking_model
from trainers import TEXTS, USUAL, Make
from transformers import TrainingArguments

import headrace.ask.planner
from headrace.integrations.transformers import HeadraceTrainer


@pytest.fixture(scope="package", autouse=True)
def plans() -> Iterator[None]:
    made = Plans()
    made.searches = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headrace.ask.planner, "make_plan", made)
        yield


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talking_model(tmp_path_factory.mktemp("talking") / "model")


@pytest.fixture(scope="session")
def texts() -> Dataset:
    return Dataset.from_list([{"text": text} for text in TEXTS])


@pytest.fixture
def make(talking: Path, texts: Dataset, tmp_path: Path) -> Iterator[Make]:
    """Make Trainers that are closed at the end; what is no argument of Trainer is one of TrainingArguments."""
    made: list[HeadraceTrainer] = []

    def maker(name: str = "run", kind: type[HeadraceTrainer] = HeadraceTrainer, **given: Any) -> HeadraceTrainer:
        own = ("train_dataset", "eval_dataset", "callbacks", "data_collator", "peft_config", "plan", "sequence_length", "model")
        args = TrainingArguments(output_dir=str(tmp_path / name), **{**USUAL, **_without(given, own)})
        usual = {"model": talking, "train_dataset": texts, "host_memory": "2GiB", "cache": tmp_path / "cache"}
        trainer = kind(args=args, **{**usual, **{key: given[key] for key in own if key in given}})
        made.append(trainer)
        return trainer

    yield maker
    for each in made:
        each.close()


def _without(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key not in names}
