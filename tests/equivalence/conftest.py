"""Tiny models in real Hugging Face directories."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import MODELS
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import headrace.ask.planner
from headrace.plan.search import make_plan
from headrace.plan.space import THRIFTS, filled, placements_of, plan_of
from headrace.terms.sizes import GIB

logging.set_verbosity_error()
logging.disable_progress_bar()


class Plans:
    """Plans each problem once: the same few are opened hundreds of times here. Most tests are not about planning: they get the
    first plan that fits.
    """

    def __init__(self) -> None:
        self.searches = True
        self._found: dict[tuple[Any, ...], Any] = {}

    def __call__(self, problem: Any, ceilings: Any = None) -> Any:
        stated = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
        # What is free changes from test to test; where it is more than these models could use, it does not matter.
        space = min(stated["allowance"].ssd_bytes or GIB, GIB)
        stated["allowance"] = dataclasses.replace(stated["allowance"], ssd_bytes=space)
        costs = stated.pop("costs_of")(1)
        key = (self.searches, repr(stated), repr(costs), repr(ceilings))
        if key not in self._found:
            first = None if self.searches else first_that_fits(problem)
            self._found[key] = first or make_plan(problem, ceilings)
        return self._found[key]


def first_that_fits(problem: Any) -> Any:
    """Return the first placement that fits under the usual policy, None if none does."""
    choices = (choice for thrift in THRIFTS for choice in placements_of(problem, problem.policies[0], thrift))
    plans = (plan_of(problem, choice) for choice in choices)
    return next((filled(problem, plan) for plan in plans if plan.fits), None)


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
