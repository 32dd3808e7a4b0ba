"""`headrace plan --link` alone: which way to share out a run, in words that follow from the figures."""

import json
from pathlib import Path

import pytest
from planned_models import llama_small, saved

from headrace.peers.which import MACHINES, ClusterShape, WhichReport, plan_which
from headrace.terms.errors import ConfigError
from headrace.terms.options.plan_options import PlanOptions


def report(alone: float | None, **tokens: float | None) -> WhichReport:
    shapes = tuple(
        ClusterShape(
            name=name,
            title=name,
            is_exact=name != "local",
            gives_up="bits" if name == "local" else "nothing",
            tokens_per_second=tokens[name],
            words="so it is",
        )
        for name in ("node", "stages", "local")
    )
    return WhichReport(
        model="made",
        machine="rtx4090",
        machines=MACHINES,
        link_bytes_per_second=12.5e6,
        alone_tokens_per_second=alone,
        shapes=shapes,
    )


@pytest.mark.parametrize(
    ("alone", "tokens", "take", "words"),
    [
        (100.0, {"node": 390.0, "stages": 300.0, "local": 395.0}, "node", "3.9 times one machine; gives up nothing"),
        (
            100.0,
            {"node": 2.0, "stages": 200.0, "local": 350.0},
            "stages",
            "Faster is local, 3.5 times one machine: gives up bits",
        ),
        (100.0, {"node": 2.0, "stages": 90.0, "local": 350.0}, "local", "gives up bits"),
        (100.0, {"node": 2.0, "stages": 90.0, "local": 101.0}, "alone", "one machine alone"),
        (None, {"node": None, "stages": 90.0, "local": None}, "stages", "where one machine alone has no room"),
    ],
)
def test_the_fastest_exact_way_that_gains_is_taken(
    alone: float | None, tokens: dict[str, float | None], take: str, words: str
) -> None:
    found = report(alone, **tokens)
    assert found.take == take
    assert words in found.advice
    assert found.advice in found.explain()
    assert json.loads(json.dumps(found.to_json()))["take"] == take


def test_a_comparison_needs_a_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="link: a comparison needs the machine"):
        plan_which(str(tmp_path), PlanOptions(link="100Mbit"), here=False)


@pytest.mark.deep
def test_over_a_slow_link_a_node_is_slower_than_stages(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", llama_small())
    options = PlanOptions(machine="rtx4090-1ssd", link="10Mbit", tokens_per_step=1024, sequence_length=128, max_grad_norm=0)
    found = plan_which(str(model), options, here=False)
    node, stages, local = found.shapes
    assert node.tokens_per_second is not None
    assert stages.tokens_per_second is not None
    assert node.tokens_per_second < stages.tokens_per_second
    assert local.tokens_per_second is not None
