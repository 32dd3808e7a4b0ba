"""Tiny models in real Hugging Face directories."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from first_plans import Plans
from plain import MODELS
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import headrace.ask.planner

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(scope="package")
def plans() -> Iterator[Plans]:
    made = Plans()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headrace.ask.planner, "make_plan", made)
        yield made


@pytest.fixture(autouse=True)
def planned(plans: Plans, request: pytest.FixtureRequest) -> None:
    """Search only for what is about planning (`searched`), and for all that is deep."""
    plans.searches = any(request.node.get_closest_marker(name) for name in ("deep", "searched"))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes (once) the directory of a model by name and dtype."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, dtype: str = "float32") -> Path:
        if (name, dtype) not in made:
            values = dict(MODELS[name])
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(7)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.02)
            path = tmp_path_factory.mktemp(f"{name}-{dtype}")
            model.to(getattr(torch, dtype)).save_pretrained(path)
            made[name, dtype] = path
        return made[name, dtype]

    return make
