"""Tiny stock models in directories, and what transformers itself generates with them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import DTYPES
from talking_model import save_talking_model
from tiny_architectures import CONFIGS, make_config, make_plain
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

Prompts = Sequence[Sequence[int]]


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that saves (once) the stock model of an architecture."""
    made: dict[tuple[str, str], Path] = {}

    def save(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            path = tmp_path_factory.mktemp(f"{name}-{dtype}")
            make_plain(make_config(CONFIGS[name]), DTYPES[dtype]).save_pretrained(path, max_shard_size="20KB")
            made[name, dtype] = path
        return made[name, dtype]

    return save


@pytest.fixture(scope="session")
def stock() -> Iterator[Callable[..., torch.Tensor]]:
    """Return a function that generates with `from_pretrained` and `generate`, experts one by one as seats have them."""
    models: dict[tuple[Path, str], Any] = {}

    def generate(
        directory: Path, dtype: str, rows: Prompts, seed: int, settings: Mapping[str, Any], *, fresh: bool = False
    ) -> Any:
        key = (directory, dtype)
        if fresh:  # some keep in their modules what ran before
            models.pop(key, None)
        if key not in models:
            models[key] = AutoModelForCausalLM.from_pretrained(
                directory, dtype=DTYPES[dtype], experts_implementation="eager"
            ).eval()
            for parameter in models[key].parameters():  # loaded, they lie as in the file: at borders that change float32 sums
                parameter.data = parameter.data.clone()
        length = max(map(len, rows))
        ids = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return models[key].generate(ids, attention_mask=mask, use_cache=True, **settings)

    yield generate
    models.clear()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template."""
    return save_talking_model(tmp_path_factory.mktemp("talks") / "model")
