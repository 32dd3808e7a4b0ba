"""What is planned for packed rows that run in groups of one length is what runs; and where it is not known, that is said.

Run: pytest tests/cli/test_packed_groups.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_worlds import POSITIONS, VOCABULARY, World
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headrace.cli import main
from headrace.model.blocks.sample_groups import sample_groups_of
from headrace.model.parts import runner
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.forecast.forecast import forecast
from headrace.plan.value.plan import Plan
from headrace.terms.packed_rows import PackedRows

EDGE = 12  # samples of fewer tokens are rotated by other factors than those of more
LENGTHS = [20, 11, 7, 13, 11, 5, 30, 16, 16, 9, 4, 14, 25, 3, 12, 10]
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [4.0] * 4, "short_factor": [1.0] * 4}
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": POSITIONS, "pad_token_id": 0}
# A line of words that says the same of every plan with groups.
SAID = "packed rows run in groups of samples of one length: "


def longrope(world: World) -> World:
    """Put another model in the place of the world's, and samples of unequal lengths as its data."""
    rope = {"original_max_position_embeddings": EDGE, "rope_parameters": LONG | {"original_max_position_embeddings": EDGE}}
    for weights in world.shards():
        weights.unlink()
    (world.model / "model.safetensors.index.json").unlink()
    config = CONFIG_MAPPING["phi3"](**SHAPE, **HEADS, **rope)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(world.model)
    world.write_rows(*({"input_ids": [2 + place for place in range(length)]} for length in LENGTHS))
    return world


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> Plan:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["plan", *map(str, words), "--sequence-length", "32", "--tokens-per-step", "128", "--json"])
    assert not left.value.code
    return Plan.from_json(json.loads(capsys.readouterr().out)["plan"])


@pytest.mark.wide
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_computes_as_many_groups_as_its_plan_counts(
    epochs: int, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def counted(positions: torch.Tensor, *, exact: bool = False) -> list[Any]:
        found = sample_groups_of(positions, exact=exact)
        if exact:
            ran.append(max(1, len(found)))
        return found

    longrope(world)
    of_plan = planned(capsys, world.model, world.data, "--ssd", world.ssd, "--host-memory", "4GiB")  # with all its trials
    words = world.train_words(tokens_per_step=128, epochs=epochs)
    del words[words.index("--max-steps") : words.index("--max-steps") + 2]
    monkeypatch.setattr(runner, "sample_groups_of", counted)
    with pytest.raises(SystemExit) as left:
        main(words)
    said = capsys.readouterr()
    assert not left.value.code, said.err
    plan = Plan.from_json(json.loads((world.run / "plan.json").read_text()))
    groups = plan.results.groups
    assert groups is not None
    assert groups.calls == pytest.approx(sum(ran) / len(ran))
    assert groups.calls > 2
    assert f"{SAID}{groups.calls:.3g} a micro-batch" in said.out
    if epochs == 1:
        assert of_plan.batch.micro_batch_sequences == plan.batch.micro_batch_sequences
        assert of_plan.results.groups == groups
    # Calls cost time, and samples by themselves spare some of attention.
    machine = replace(nominal_machine(2, host_bytes=4 << 30, device_bytes=None), launch_seconds=0.01)  # not lost among others
    one, many = forecast(plan.with_results(groups=None), machine), forecast(plan, machine)
    assert many.step_seconds > one.step_seconds
    assert many.flops_per_step < one.flops_per_step
    more = forecast(plan.with_results(groups=replace(groups, calls=2 * groups.calls)), machine)
    assert more.step_seconds > many.step_seconds


@pytest.mark.wide
def test_without_data_the_plan_says_that_groups_are_unknown(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    longrope(world)
    without = planned(capsys, world.model)
    assert without.results.groups is None
    assert [note for note in without.results.notes if note.startswith(SAID)] == [
        f"{SAID}how many is unknown without the data; times count one a micro-batch"
    ]
    unpacked = planned(capsys, world.model, world.data, "--no-packing")
    assert (unpacked.results.groups, unpacked.results.notes) == (None, ())


def test_other_models_have_no_groups(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, world.model, world.data)
    assert (plan.results.groups, plan.results.notes) == (None, ())
    assert "groups" not in plan.to_json()["placement"]["results"]


@given(
    rows=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=12),
    step=st.integers(1, 6),
    micro=st.integers(1, 6),
)
@settings(max_examples=60, deadline=None)
def test_groups_are_counted_as_the_model_makes_them(rows: list[list[int]], step: int, micro: int) -> None:
    length = 60
    whole = [(*row, length - sum(row)) if sum(row) < length else tuple(row) for row in rows]
    found = PackedRows(length, tuple(whole)).groups(micro, step)
    positions = torch.stack([torch.cat([torch.arange(tokens) for tokens in row]) for row in whole])
    parts = [part for of_step in positions.split(step) for part in of_step.split(micro)]
    calls = [max(1, len(sample_groups_of(part, exact=True))) for part in parts]
    assert (1 if found is None else found.calls) == pytest.approx(sum(calls) / len(calls))


def test_a_plan_with_groups_is_stored_and_read(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    longrope(world)
    plan = planned(capsys, world.model, world.data)
    kept = Path(world.folder / "plan.json")
    kept.write_text(json.dumps(plan.to_json()))
    world.write_rows({"input_ids": list(range(2, 34))}, {"input_ids": list(range(2, 18))})  # other data, other groups
    again = planned(capsys, world.model, world.data, "--plan", kept)
    assert plan.results.groups is not None
    assert again.results.groups is not None
    assert again.results.groups.calls != plan.results.groups.calls
    assert [note for note in again.results.notes if note.startswith(SAID)] == [
        f"{SAID}{again.results.groups.calls:.3g} a micro-batch, on average"
    ]
