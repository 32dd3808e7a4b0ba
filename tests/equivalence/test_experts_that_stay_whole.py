"""A mixture that has no room, and whose experts cannot come one at a time, is refused with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiers import sampled

from headrace.ask.answer import plan_model
from headrace.engine.trainer import Engine
from headrace.terms.errors import PlanInfeasible
from headrace.terms.options.options import Options

TOGETHER = {"tokens_per_step": 32, "sequence_length": 16, "host_memory": "4GiB", "device_memory": 1}
WORDS = "experts cannot come one at a time, which would take less: "


def refused(path: Path, **more: Any) -> str:
    options = Options(machine="rtx4090-4ssd", **TOGETHER, **more)
    report = plan_model(path, options, here=False, variants_seconds=0)
    assert not report.fits
    return report.reason


@pytest.mark.wide
@pytest.mark.parametrize(
    ("option", "value", "reason"),
    sampled(
        [
            ("gradient_sum", "tree", "gradients are summed as a tree"),
            ("train", "matrices", "not all of the model is trained in place"),
            ("gradient", "lsp", "lsp:dimension=64 takes whole blocks"),
        ]
    ),
)
def test_a_refused_mixture_says_why_its_experts_come_with_their_blocks(
    option: str, value: str, reason: str, model_dir: Callable[..., Path]
) -> None:
    words = refused(model_dir("many-experts"), **{option: value})
    assert WORDS in words
    assert reason in words.split(WORDS)[1]


@pytest.mark.deep
def test_a_run_is_refused_in_the_words_of_its_plan(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    options = Options(output=tmp_path / "run", gradient_sum="tree", **TOGETHER)
    with pytest.raises(PlanInfeasible, match=f"{WORDS}gradients are summed as a tree"):
        Engine.open(model_dir("many-experts"), options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", sampled(["llama", "many-experts"]))
def test_a_model_without_experts_or_with_parts_is_refused_without_such_words(name: str, model_dir: Callable[..., Path]) -> None:
    assert "one at a time" not in refused(model_dir(name))
