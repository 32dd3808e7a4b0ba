"""`headrace plan --ranks`: each rank reads, writes and updates its part; the rest of a unit crosses the link."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from planned_models import llama_small, saved
from typer.testing import CliRunner

from headrace.ask.answer import plan_model
from headrace.cli.app import app
from headrace.peers.ranks.planning import RanksReport, plan_ranks
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.forecast.forecast import programs_of
from headrace.plan.schedules.ranks import of_rank, share_of_machine
from headrace.plan.value.buffer_sizes import buffer_groups
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.program import Program, Verb

MACHINE = "rtx4090-1ssd"
LENGTH = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("ranks") / "model", llama_small())


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    found = plan_model(str(model), options_of(gradient_dtype="float32"), here=False).plan
    assert found is not None
    return found


def options_of(**more: Any) -> PlanOptions:
    return PlanOptions.of(
        {"machine": MACHINE, "sequence_length": LENGTH, "tokens_per_step": 16 * LENGTH, "host_memory": "1GiB", **more}
    )


def report_of(model: Path, **more: Any) -> RanksReport:
    return plan_ranks(str(model), options_of(**more), here=False)


def bytes_by_verb(programs: Sequence[Program]) -> Counter[str]:
    found: Counter[str] = Counter()
    for op in programs[-1].ops:
        found[op.act] += op.bytes
    return found


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_moves_its_part_of_every_unit_and_exchanges_the_rest(plan: Plan, ranks: int) -> None:
    one, rank = (bytes_by_verb(programs_of(plan, durable=True, ranks=each)) for each in (1, ranks))
    for verb in (Verb.FETCH, Verb.READ_STATES, Verb.UPDATE, Verb.WRITE_STATES, Verb.WRITE_WEIGHTS):
        assert rank[verb] == pytest.approx(one[verb] / ranks, rel=0.01, abs=4096)
    # The reference: gradients are scattered once, weights are gathered as often as they are fetched, or once after an update.
    parameters = sum(unit.update_elements for unit in plan.units)
    assert rank[Verb.SCATTER] == pytest.approx(4 * parameters * (ranks - 1) / ranks, rel=0.01)
    assert rank[Verb.GATHER] >= 2 * parameters * (ranks - 1) / ranks * 0.99
    assert rank[Verb.GATHER] + rank[Verb.SCATTER] <= 8 * parameters * (ranks - 1) / ranks * 1.01
    for verb in ("input-out", "input-in", Verb.DRAIN, Verb.UPLOAD):
        assert rank[verb] == one[verb]


@pytest.mark.wide
@pytest.mark.parametrize(("ranks", "sharers"), [(2, 2), (4, 2), (6, 3)])
def test_ranks_of_one_machine_gather_what_others_hold_once_together(plan: Plan, ranks: int, sharers: int) -> None:
    alone, shared = (bytes_by_verb(programs_of(plan, durable=True, ranks=ranks, sharers=each)) for each in (1, sharers))
    # Of W ranks on W / L machines, L together take the parts of W - L others.
    assert shared[Verb.GATHER] == pytest.approx(alone[Verb.GATHER] * (ranks - sharers) / (ranks - 1) / sharers, abs=4096)
    assert {verb: shared[verb] for verb in shared if verb is not Verb.GATHER} == {
        verb: alone[verb] for verb in alone if verb is not Verb.GATHER
    }


@pytest.mark.deep
def test_a_rank_counts_its_share_of_the_host_copy(model: Path) -> None:
    found = {}
    for link in (None, "100Gbit"):
        plan = report_of(model, ranks=4, link=link).plan.plan
        assert plan is not None
        groups = [group for group in buffer_groups(plan).values() if group.purpose == "weights" and group.tier == "host"]
        own = sum(group.total_bytes for group in groups if not group.is_shared)
        shared = sum(group.total_bytes for group in groups if group.is_shared)
        found[link] = plan.results.peak_bytes["host"]["weights"] - own, shared
        assert shared > 0
    assert found[None][0] == pytest.approx(found[None][1] / 4, abs=4096)
    assert found["100Gbit"][0] == found["100Gbit"][1]


@pytest.mark.wide
def test_programs_of_one_process_are_left_alone(plan: Plan) -> None:
    (program, *_) = programs_of(plan, durable=True)
    assert of_rank(program, 1) is program


def test_ranks_of_one_machine_share_it() -> None:
    machine = load_profile(MACHINE)
    share = share_of_machine(machine, 4)
    assert share.ssd_read_bytes_per_second == pytest.approx(machine.ssd_read_bytes_per_second / 4)
    assert share.update_bytes_per_second == pytest.approx(machine.update_bytes_per_second / 4)
    assert share.host_memory_bytes == machine.host_memory_bytes // 4
    assert share.flops_per_second == machine.flops_per_second  # each has a GPU
    assert share_of_machine(load_profile("luwu-node-1ssd"), 2).cores == load_profile("luwu-node-1ssd").cores // 2


@pytest.mark.deep
def test_faster_links_and_more_machines_make_no_step_slower(model: Path) -> None:
    found = [report_of(model, ranks=2, link=link).tokens_per_second for link in ("100Mbit", "1Gbit", "100Gbit")]
    assert found == sorted(found)
    assert report_of(model, ranks=4, link="100Gbit").tokens_per_second > found[-1]


@pytest.mark.wide
def test_the_report_says_what_all_ranks_do(model: Path) -> None:
    words = [
        "plan",
        str(model),
        "--machine",
        "rtx4090",
        "--sequence-length",
        str(LENGTH),
        "--tokens-per-step",
        str(16 * LENGTH),
    ]
    found = json.loads(CliRunner().invoke(app, [*words, "--ranks", "3", "--json"]).output)
    assert (found["ranks"], found["machines"]) == (3, 1)
    assert (found["tokens_per_step"], found["rank_tokens_per_step"]) == (16 * LENGTH, 6 * LENGTH)
    assert found["without_effect"] == []
    text = CliRunner().invoke(app, [*words, "--ranks", "4", "--link", "10Gbit"]).output
    assert "4 on a machine each" in text
    assert "a rank sends and receives" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tokens_per_step": 2 * LENGTH}, "2 rows of 128 for 4 ranks"),
        ({"machine": None}, "ranks: a plan needs the machine"),
        ({"gradient": "lsp"}, "gradient: lsp"),
        ({"loss": "dpo"}, "loss: dpo"),
        ({"workers": 2}, "ranks and workers"),
        ({"local_steps": 2}, "local_steps and ranks"),
        ({"nodes": 2}, "nodes: given without workers"),
    ],
)
def test_what_ranks_cannot_do_is_refused(model: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        report_of(model, ranks=4, **more)
