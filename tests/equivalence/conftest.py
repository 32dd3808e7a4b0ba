"""Tiny models in real Hugging Face directories."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import MODELS
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import headrace.answers.planner
from headrace.model import profile
from headrace.plan.search import make_plan
from headrace.terms.sizes import GIB

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(scope="package", autouse=True)
def profiled_and_planned_once() -> Iterator[None]:
    """Profile each model once for each shape, and plan each problem once: the same few are opened hundreds of times here."""
    known: dict[tuple[Any, ...], Any] = {}

    def profile_once(chain: Any, sequences: int, length: int, **options: Any) -> Any:
        key = (chain.config.to_json_string(), chain.compute_dtype, str(chain.device), chain.notes, sequences, length)
        key += (*chain.layouts, chain.adapters and (chain.adapters.settings, *chain.adapters.layouts.values()))
        if key not in known:
            known[key] = profile(chain, sequences, length, **options)
        return known[key]

    plans: dict[tuple[Any, ...], Any] = {}

    def plan_once(problem: Any, ceilings: Any = None) -> Any:
        stated = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
        # What is free changes from test to test; where it is more than these models could use, it does not matter.
        space = min(stated["allowance"].ssd_bytes or GIB, GIB)
        stated["allowance"] = dataclasses.replace(stated["allowance"], ssd_bytes=space)
        costs = stated.pop("costs_of")(1)
        key = (repr(stated), repr(costs), repr(ceilings))
        if key not in plans:
            plans[key] = make_plan(problem, ceilings)
        return plans[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["headrace.model.cost_profile"], "profile", profile_once)
        patch.setattr(headrace.answers.planner, "make_plan", plan_once)
        yield


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
