"""A frozen head that compute has for the loss only gives the bits of one that stays, wherever things live."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from short_run import short_run
from test_embedding_by_rows import CASES, life, opened, rows
from test_hosted import ONE_ROW
from tiers import sampled

from headrace.engine.trainer import Engine
from headrace.flow.weights import weights
from headrace.plan.value.choices import Hosted
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError

STEPS = 2
BRING = weights.visit


def home(plan: Plan) -> str:
    return "host" if plan.separate_device else "ssd"


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Get a mark for each time that a head comes."""
    found: list[int] = []
    monkeypatch.setattr(weights, "visit", lambda stream, unit: (found.append(unit), BRING(stream, unit))[1])
    return found


@pytest.mark.parametrize("case", sampled(CASES, ("a device", "matrices of blocks")))
@pytest.mark.parametrize("name", sampled(("llama", "mixtral-aux", "deepseek", "gpt-oss"), ("llama",)))
def test_it_trains_as_one_that_stays(
    name: str, case: str, model_dir: Callable[..., Path], tmp_path: Path, brought: list[int]
) -> None:
    def look(engine: Engine) -> None:
        assert engine._steps is not None
        unit = engine._steps.parts.plan.ends[-1]
        assert engine._steps.parts.buffers.residents[unit].numel() == 0, "it has left"

    path, options = model_dir(name, "bfloat16"), {"compute_dtype": "bfloat16", **CASES[case]}
    expected = train(path, tmp_path / "stays", steps=STEPS, adjust=SPLIT, **options)
    assert not brought
    change = SPLIT | rows() | {"visiting_head": home}
    found = train(path, tmp_path / "visits", steps=STEPS, adjust=change, inspect=look, **options)
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    assert len(brought) == STEPS, "once a step"


@pytest.mark.wide
@pytest.mark.parametrize("device", [None, "1GiB"])
def test_a_run_goes_on_where_it_was_and_evaluates_as_ever(
    device: str | None, model_dir: Callable[..., Path], tmp_path: Path, brought: list[int]
) -> None:
    path = model_dir("llama", "bfloat16")
    stays, *expected = life(path, tmp_path / "stays", lambda plan: replace(plan, visiting_head=None), device)
    visits, *found = life(path, tmp_path / "visits", lambda plan: replace(plan, visiting_head=home(plan)), device)
    assert stays.visiting_head is None
    assert visits.visiting_head is not None
    assert found == expected
    assert len(brought) == 5


@pytest.mark.wide
@pytest.mark.parametrize("more", sampled([{}, {"hosted": Hosted(coming=2, going=2)}], [{}]))
def test_it_stays_between_the_two_passes_of_a_loss_of_the_whole_step(
    more: dict[str, Any], model_dir: Callable[..., Path], tmp_path: Path, brought: list[int]
) -> None:
    batches = [batch_of(ROWS, LENGTH, seed) | {"reference_log_probs": torch.full((ROWS,), -40.0)} for seed in range(STEPS)]
    path, found = model_dir("llama", "bfloat16"), []
    for number, head in enumerate((None, "host")):
        change = ONE_ROW | more | {"visiting_head": head}
        options: dict[str, Any] = {"device_memory": "1GiB", "adjust": change, "loss": "dpo", "adapter": "lora:rank=4"}
        found.append(short_run(path, tmp_path / f"run{number}", batches, **options))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], weight) for name, weight in found[1][1].items())
    assert len(brought) == STEPS, "once a step"


def test_a_plan_in_which_it_comes_is_for_heads_that_are_frozen(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama", "bfloat16")
    plan = opened(path, tmp_path / "trained", "1GiB")
    with pytest.raises(ConfigError, match="the head has its memory for the loss only in the plan, and cannot here"):
        opened(path, tmp_path / "given", "1GiB", replace(plan, visiting_head="host"))
