"""What combines with what: each refusal names what to choose instead; what is not refused runs, is cut short, and goes on."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from choices import AT_NODE, LOCAL_STEPS, STAGES, choices, combinations, refusal, refused
from cpu_work import loops_in
from crew import crew, node_run
from pages import generated
from plain import LENGTH, ROWS, SPLIT, batch_of, packed
from ranks import staged_run
from safetensors.torch import load_file
from short_run import short_run

from headrace.engine.trainer import Engine
from headrace.peers.local_steps.engine import Learner
from headrace.peers.local_steps.number_file import NumberFile
from headrace.plan.value.plan import Plan
from headrace.terms.errors import ConfigError
from headrace.terms.options.options import Options
from headrace.update.combinations import refuse_combination
from headrace.update.sites.travel import TRAVELS


def test_the_page_is_what_the_code_refuses() -> None:
    assert generated("features.md", "tests/choices.py") == combinations(), "run: PYTHONPATH=tests python tests/choices.py"


def test_each_refusal_comes_at_once_and_names_what_to_choose_instead() -> None:
    loops, found = loops_in(lambda: list(refused()))
    assert loops < 10 * len(found), "each in less than a second of an idle core"
    assert len(found) >= 10
    for one, other, why in found:
        assert re.search(r"[;:] (give|leave|use|set|train) [^;:]*$", why), (one, other, why)
    with pytest.raises(ConfigError, match="gradient: 'lpa' is not one of dense, lsp, rows"):
        refuse_combination(Options(gradient="lpa"))


# -- what is not refused ----------------------------------------------------------------------------------------------------

# What is no option: where states live, how many micro-batches are summed, whether rows hold several samples.
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "states": {"SSD": {"resident_states": ()}, "memory": {"resident_states": lambda plan: stateful_units(plan)}},
    "micro-batches": {"one": {}, "several": SPLIT},
    "rows": {"one sample": {}, "packed": {}},
}


def stateful_units(plan: Plan) -> tuple[int, ...]:
    """Return the units that have states: under some rules none has."""
    return tuple(unit for unit in plan.trained_units if plan.state_bytes(unit))


def rows_of_pairs() -> Iterator[dict[str, str]]:
    """Yield rows of choices that are not refused, in which every two meet that are not refused together."""
    axes = choices() | MORE
    axes["kernels"] = {"the model's": {}}  # others want a compiler, or a GPU
    bad = {frozenset(each[:2]) for each in refused()}
    names = list(axes)
    missing = {
        frozenset(((one, a), (other, b)))
        for one, other in itertools.combinations(names, 2)
        for a, b in itertools.product(axes[one], axes[other])
        if frozenset((a, b)) not in bad
    }
    while missing:
        row: dict[str, str] = dict(sorted(min(missing, key=lambda pair: sorted(pair))))
        for name in names:
            if name in row:
                continue
            fitting = [value for value in axes[name] if all(frozenset((value, each)) not in bad for each in row.values())]
            gained = {value: sum(frozenset(((name, value), each)) in missing for each in row.items()) for value in fitting}
            row[name] = max(fitting, key=lambda value: gained[value])
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        yield row


def test_rows_of_pairs_have_no_pair_that_is_refused() -> None:
    rows = list(rows_of_pairs())
    axes = choices()
    assert 15 <= len(rows) <= 100
    for row in rows:
        for one, other in itertools.combinations(axes, 2):
            assert not refusal(axes[one][row[one]], axes[other][row[other]])


def moved(learner: Learner, base: NumberFile) -> bool:
    """Return whether any number is not what it was."""
    return any(values.any() for values, _ in learner.displacement(base, TRAVELS["bfloat16"]))


def learn_and_meet(model: Path, folder: Path, batches: list[dict[str, torch.Tensor]], options: dict[str, Any]) -> None:
    """Take two steps, go back to where all began, and take the third after a restart."""
    rows, length = batches[0]["input_ids"].shape
    given = {"output": folder / "run", "tokens_per_step": rows * length, "sequence_length": length, "host_memory": "4GiB"}
    with Learner.open(model, Options(**given, learning_rate=1e-3, **options)) as learner:
        base = NumberFile(folder / "base", learner.masters.counts)
        base.write(learner.numbers())
        losses = [learner.step(batch).loss for batch in batches[:2]]
        assert moved(learner, base), options
        learner.adopt(base, {"version": 1})
        exact = options["optimizer"] != "lomo:master=none" or options["compute_dtype"] == "float32"
        assert not exact or not moved(learner, base), options
    with Learner.resume(folder / "run") as learner:
        assert learner.position == {"version": 1}
        losses.append(learner.step(batches[2]).loss)
    assert all(0 < loss < 10 for loss in losses), options


def stage_and_go_on(
    model: Path, folder: Path, batches: list[dict[str, torch.Tensor]], adjust: dict[str, Any], options: dict[str, Any]
) -> None:
    """Take two steps in two stages, and the third after both were started again."""
    given = {"learning_rate": 1e-3, **options}
    results, weights = staged_run(model, folder / "run", batches[:2], 2, adjust=adjust, **given)
    again, later = staged_run(model, folder / "run", batches[2:], 2, resume=True)
    assert all(0 < result.loss < 10 for result in (*results, *again)), options
    assert any(not torch.equal(later[name], before) for name, before in weights.items()), options


def batches_of(row: dict[str, str]) -> list[dict[str, torch.Tensor]]:
    made = [batch_of(ROWS, LENGTH, seed, padded=True) for seed in range(3)]
    if row["rows"] == "one sample":
        return made
    lengths = [LENGTH - 3 * sample for sample in range(ROWS)]
    return [packed(each, [length // 2 for length in lengths], [(0, 1), (2, 3), (4, 5)]) for each in made]


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_what_is_not_refused_runs_and_goes_on_where_it_was_cut_short(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Every two choices meet in a run of three steps, which a second run with a cut after the second ends alike."""
    path, axes = model_dir("llama"), choices() | MORE
    for number, row in enumerate(rows_of_pairs()):
        options: dict[str, Any] = {}
        for name in choices():
            options |= axes[name][row[name]]
        at_node, batches = options.pop(AT_NODE, False), batches_of(row)
        folder = tmp_path / str(number)
        folder.mkdir()
        if at_node:
            with crew() as made:
                losses, _ = node_run(path, folder / "run", batches, made, **options)
            assert all(0 < loss < 10 for loss in losses), row
            continue
        if options["gradient"] == "lsp":
            options["gradient"] = "lsp:dimension=32,nonzeros=4,check=2,alpha=0.1"
        if options.pop(LOCAL_STEPS, False):
            learn_and_meet(path, folder, batches, options)
            continue
        adjust = dict(axes["states"][row["states"]])
        if row["micro-batches"] == "several":
            rows = batches[0]["input_ids"].shape[0]
            adjust |= SPLIT | {"micro_batch_sequences": 2, "num_micro_batches": -(-rows // 2)}
        if options.pop(STAGES, False):
            stage_and_go_on(path, folder, batches, adjust, options)
            continue
        common: dict[str, Any] = {"adjust": adjust, "learning_rate": 1e-3, **options}
        losses, weights = short_run(path, folder / "run", batches, **common)
        assert all(0 < loss < 10 for loss in losses), row
        again, other = cut_short(path, folder / "cut", batches, common)
        assert again == losses[2:], row
        for name, want in weights.items():
            assert torch.equal(other[name], want), (row, name)


@pytest.mark.deep
@pytest.mark.timeout(3000)
def test_what_goes_behind_a_node_gives_the_bits_of_one_machine_with_two_workers(
    model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Every rule and type, with gradients added as a tree; runs differ in the other axes, too."""
    path, axes = model_dir("llama"), choices() | MORE
    rows = [row for row in rows_of_pairs() if row["place"] == AT_NODE]
    assert {row["rule"] for row in rows} == set(axes["rule"])
    for number, row in enumerate(rows):
        options: dict[str, Any] = {"gradient_sum": "tree"}
        for name in choices():
            options |= axes[name][row[name]]
        del options[AT_NODE]
        batches, folder, plans = batches_of(row), tmp_path / str(number), list[Plan]()
        folder.mkdir()
        sequences = batches[0]["input_ids"].shape[0]
        split = SPLIT | {"micro_batch_sequences": 1, "num_micro_batches": sequences}

        def keep(engine: Engine, plans: list[Plan] = plans) -> None:
            plans.append(engine.plan)

        losses, weights = short_run(
            path, folder / "local", batches, adjust=split, inspect=keep, **{"learning_rate": 1e-3, **options}
        )
        with crew(2) as made:
            again, found = node_run(path, folder / "node", batches, made, plan=plans[0], **options)
        assert again == pytest.approx(losses, rel=1e-6), row
        for name, want in weights.items():
            assert torch.equal(found[name], want), (row, name)


def cut_short(
    path: Path, run: Path, batches: list[dict[str, torch.Tensor]], common: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the last loss and the weights of a run that ended without a word after two steps, and went on."""

    class Cut(Exception):
        pass

    def cut(engine: Engine) -> None:
        engine.flush()
        engine._shut_down()
        engine._closers.close()
        raise Cut

    with pytest.raises(Cut):
        short_run(path, run, batches[:2], inspect=cut, **common)
    with Engine.resume(run) as engine:
        done = engine.step_index
        losses = [engine.step(batch).loss for batch in batches[done:]]
        engine.save_pretrained(run / "out")
    assert done == 2
    weights: dict[str, torch.Tensor] = {}
    for shard in sorted((run / "out").glob("*.safetensors")):
        weights |= load_file(shard)
    return losses, weights
