"""`headrace plan --workers`: what workers and a node will do together, whether they fit, and what to buy next."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked import run_headrace
from tiers import sampled
from transformers import GPT2Config, LlamaConfig

from headrace.peers.node.cluster import NODE, WORKER
from headrace.peers.node.planning import plan_cluster
from headrace.peers.node.report import ClusterReport
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import ConfigError
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.summing import partial_sums
from headrace.terms.program import Verb

STEP: dict[str, Any] = {"tokens_per_step": 16 * 512, "sequence_length": 512, "max_grad_norm": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=4096,
        max_position_embeddings=1024,
    )
    config.save_pretrained(folder)
    return folder


def report(model: Path, **more: Any) -> ClusterReport:
    values = {"machine": "a100-40g", "workers": 4, "node_ssds": 4, "link": "10Gbit"} | STEP | more
    return plan_cluster(model, PlanOptions(**values))


@pytest.fixture(scope="module")
def found(model: Path) -> ClusterReport:
    return report(model)


@pytest.mark.wide
def test_json_has_tokens_of_all_workers_and_of_each(found: ClusterReport):
    values = json.loads(json.dumps(found.to_json()))
    assert values["fits"]
    assert values["tokens_per_second"] == pytest.approx(values["tokens_per_step"] / values["step_seconds"])
    assert values["tokens_per_second_per_worker"] == pytest.approx(values["tokens_per_second"] / 4)
    assert values["lower_bound_seconds"] <= values["step_seconds"]
    assert values["worker_plan"]["batch"]["tokens_per_step"] == 4 * 512
    assert values["node_plan"]["serves"]
    assert values["buy_next"] in {"drives", "nodes", "links", "cores", "tokens", "none"}


def test_the_text_says_what_limits_and_what_to_buy(found: ClusterReport):
    text = found.explain()
    assert "limited by the links" in text  # 10 Gbit/s is little
    assert found.buy_next in ("links", "tokens")
    assert "buy next" in text
    assert "tokens/s of all workers" in text


def test_bytes_are_those_of_the_exchange(found: ClusterReport):
    values, copy = found.to_json(), 2 * found.parameters
    pulled = values["node_bytes_sent_per_step"]
    assert copy < pulled <= 2.01 * copy  # a few blocks are in slots at the turn
    assert values["node_bytes_received_per_step"] == pytest.approx(copy, rel=0.01)
    exchanged = 2 * 0.75 * copy  # between workers gradients are float32
    assert values["worker_bytes_received_per_step"] == pytest.approx(pulled + exchanged, rel=0.01)
    assert values["worker_bytes_sent_per_step"] == pytest.approx(0.75 * pulled + exchanged + 0.25 * copy, rel=0.01)


@pytest.mark.parametrize(("workers", "copies"), sampled([(1, 1), (4, 2)]))
def test_gradients_of_several_workers_leave_the_device_in_float32(model: Path, workers: int, copies: int):
    """They are rounded after they are added; the node receives them rounded."""
    forecast = report(model, workers=workers, tokens_per_step=workers * 2048).forecast
    assert forecast is not None
    drained, received = (
        sum(each.op.bytes for each in forecast.timeline.of_rank(rank) if each.op.verb is verb)
        for rank, verb in ((WORKER, Verb.DRAIN), (NODE, Verb.RECEIVE))
    )
    assert drained == copies * received > 0


@pytest.mark.wide
def test_a_worker_holds_no_more_of_a_deeper_model(tmp_path: Path):
    held = []
    for depth in (4, 8):
        folder = tmp_path / str(depth)
        GPT2Config(n_embd=512, n_layer=depth, n_head=8, vocab_size=2048, n_positions=512).save_pretrained(folder)
        worker = report(folder).worker_plan
        assert worker is not None
        held.append(
            {
                tier: {name: rows[name] for name in ("weights", "gradients", "states") if name in rows}
                for tier, rows in worker.results.peak_bytes.items()
            }
        )
    assert held[0] == held[1]


@pytest.mark.wide
def test_more_drives_and_links_are_no_slower(model: Path, found: ClusterReport):
    assert found.forecast is not None
    for more in ({"node_ssds": 16}, {"link": "40Gbit"}, {"nodes": 2}):
        better = report(model, **more).forecast
        assert better is not None
        assert better.step_seconds <= found.forecast.step_seconds * 1.01


def test_what_cannot_be_is_refused_by_name(model: Path):
    with pytest.raises(ConfigError, match="workers: a plan needs the machine"):
        plan_cluster(model, PlanOptions(workers=2, **STEP))
    with pytest.raises(ConfigError, match="16 rows of 512 for 17 workers"):
        report(model, workers=17)
    with pytest.raises(ConfigError, match="nodes: given without workers"):
        PlanOptions(nodes=2)
    for wrong in ("fast", "0Gbit", "-1Gbit", "10 furlongs"):
        with pytest.raises(ConfigError, match=r"link: .*100Gbit"):
            PlanOptions(workers=2, link=wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient": "lsp"}, "gradient: lsp.* is not possible at a node: workers send whole gradients"),
        ({"adapter": "lora"}, "adapter: lora.* is not possible at a node"),
        ({"train": "matrices"}, "train: matrices is not possible at a node"),
    ],
)
def test_what_a_node_refuses_a_plan_refuses_in_the_same_words(options: dict[str, Any], words: str, model: Path):
    with pytest.raises(ConfigError, match=words):
        report(model, **options)


@pytest.mark.deep
def test_a_plan_under_a_tree_has_memory_for_its_partial_sums(model: Path):
    more = report(model, gradient_sum="tree", tokens_per_step=64 * 512, device_memory="1GiB")
    less = report(model, tokens_per_step=64 * 512, device_memory="1GiB")
    assert more.worker_plan is not None
    assert less.worker_plan is not None
    assert more.worker_plan.gradients.order == "tree"
    assert more.worker_plan.batch.num_micro_batches > 1
    sums = partial_sums(more.worker_plan.batch.num_micro_batches, "tree")
    largest = max(unit.num_elements for unit in more.worker_plan.units)
    gradients = [plan.results.peak_bytes["device"]["gradients"] for plan in (more.worker_plan, less.worker_plan)]
    assert gradients[0] - gradients[1] >= (sums - 1) * 4 * largest


def test_rates_are_read_in_bits_and_bytes():
    for text, expected in (("100Gbit", 12.5e9), ("10Gbit/s", 1.25e9), ("1.25GB", 1.25e9), ("1GB/s", 1e9)):
        assert PlanOptions(workers=1, link=text).link == expected
    assert PlanOptions.of(PlanOptions(workers=1, link="25Gbit").to_json()).link == 25e9 / 8


@pytest.mark.wide
def test_a_node_that_is_too_small_is_named(model: Path):
    small = replace(load_profile("luwu-node"), host_memory_bytes=450 << 20)
    refused = report(model, node_machine=small)
    assert not refused.fits
    assert refused.reason.startswith("the node: ")
    assert refused.to_json()["step_seconds"] is None
    assert "no: the node: " in refused.explain()


@pytest.mark.wide
def test_a_deferred_step_waits_at_the_node(model: Path, found: ClusterReport):
    clipped = report(model, max_grad_norm=1.0)
    assert clipped.node_plan is not None
    assert clipped.node_plan.updates.policy == "deferred"
    assert clipped.worker_plan == found.worker_plan


@pytest.mark.deep
def test_the_headline_on_the_rig_of_luwu(tmp_path: Path):
    # 134 tokens/s of each of 8 workers are published, 3.98 times ZeRO-Infinity.
    GPT2Config(
        n_embd=12288, n_layer=96, n_head=96, vocab_size=50257, n_positions=2048, activation_function="gelu_pytorch_tanh"
    ).save_pretrained(tmp_path)
    command = "--machine a100-40g --workers 8 --link 100Gbit --tokens-per-step 131072 --sequence-length 1024 --max-grad-norm 0"
    speeds = []
    for ssds in ("12", "48"):
        words = ["plan", str(tmp_path), *command.split(), "--node-ssds", ssds, "--json"]
        done = run_headrace(*words)
        assert done.returncode == 0, done.stderr
        speeds.append(json.loads(done.stdout)["tokens_per_second_per_worker"])
    assert speeds[0] >= 134
    assert speeds[1] >= speeds[0]


@pytest.mark.wide
def test_a_span_of_workers_is_planned_at_both_ends(model: Path) -> None:
    words = ["plan", str(model), "--machine", "a100-40g", "--tokens-per-step", "8192", "--sequence-length", "512", "--json"]
    found = json.loads(run_headrace(*words, "--workers", "1:4").stdout)
    assert (found["workers"], found["least"]["workers"]) == (4, 1)
    assert min(found["tokens_per_second"], found["least"]["tokens_per_second"]) > 0
    assert "with 1 worker: " in run_headrace(*words[:-1], "--workers", "1:4").stdout
    refused = run_headrace(*words, "--workers", "4:1")
    assert refused.returncode == 2
    assert "MIN:MAX" in refused.stderr
