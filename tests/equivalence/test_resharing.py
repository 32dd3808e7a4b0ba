"""A run of ranks goes on with more or fewer of them: the same bits, and killed meanwhile it is still the run that it was."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, SPLIT, batch_of
from ranks import ranks_run
from short_run import short_run
from tiers import sampled

from headrace.peers.ranks import resharing
from headrace.plan.value.plan import Plan
from headrace.store import manifest, replacing
from headrace.store.shard_store import ShardStore
from headrace.terms.errors import ConfigError, RunDirectoryError

OPTIONS: dict[str, Any] = {"gradient_sum": "tree", "max_grad_norm": 0.5}
BATCHES = [batch_of(8, LENGTH, seed) for seed in range(4)]
Weights = dict[str, torch.Tensor]


class Killed(Exception):
    """Stands for a kill: nothing after it is done."""


@pytest.fixture
def model(model_dir: Callable[..., Path]) -> Path:
    return model_dir("llama", "bfloat16")


def alone(model: Path, output: Path, **options: Any) -> tuple[Weights, Plan]:
    """Return the final weights of one process, and its plan."""
    plans = list[Plan]()
    split = {**SPLIT, "num_micro_batches": 4}
    _, weights = short_run(
        model, output, BATCHES, adjust=split, inspect=lambda engine: plans.append(engine.plan), **OPTIONS, **options
    )
    return weights, plans[0]


def equal(found: Weights, weights: Weights) -> bool:
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("sizes", "options"),
    sampled(
        [
            ((2, 3), {}),
            ((3, 2), {}),
            ((4, 2, 4), {}),
            ((2, 4), {"adapter": "lora:rank=4"}),
            ((2, 3), {"optimizer": "adamw:moments=int8"}),
            ((3, 2), {"optimizer": "lomo"}),
            ((2, 3), {"checkpoint_every": 2}),
        ],
        [((2, 3), {})],
    ),
)
def test_another_number_of_ranks_gives_the_same_bits(
    sizes: tuple[int, ...], options: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    weights, plan = alone(model, tmp_path / "local", **options)
    output, found = tmp_path / "ranks", dict[str, torch.Tensor]()
    for turn, size in enumerate(sizes):
        last = turn == len(sizes) - 1
        batches = BATCHES[turn : len(BATCHES) if last else turn + 1]
        shutil.rmtree(tmp_path / "ranks-out", ignore_errors=True)
        _, found = ranks_run(model, output, batches, size, plan=plan, resume=turn > 0, **OPTIONS, **options)
    assert equal(found, weights)
    kept = sorted(path.name for path in tmp_path.glob("ranks-rank-*"))
    assert len(kept) == sizes[-1] - 1, "the parts of earlier ranks are gone"
    assert not replacing.place_of_new(output).exists()


POINTS: dict[str, tuple[Any, str]] = {
    "before anything is written": (resharing, "introduce"),
    "while parts are copied": (resharing, "_copy"),
    "when parts are committed": (resharing, "replace_store"),
    "when the change is noted": (resharing, "finish_replacing"),
    "before the manifest": (replacing, "announce_manifest"),
    "after the manifest": (replacing, "remove_tree"),
    "before the old data go": (replacing, "remove_folders"),
}


@pytest.mark.wide
@pytest.mark.parametrize("point", sampled(POINTS, ["while parts are copied", "before the manifest"]))
@pytest.mark.parametrize("then", sampled([2, 3], [3]))
def test_killed_meanwhile_it_is_still_the_run(
    point: str, then: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, plan = alone(model, tmp_path / "local")
    output = tmp_path / "ranks"
    ranks_run(model, output, BATCHES[:2], 2, plan=plan, **OPTIONS)
    shutil.rmtree(tmp_path / "ranks-out")

    def kill(*arguments: Any, **more: Any) -> Any:
        raise Killed

    with monkeypatch.context() as cut:
        cut.setattr(*POINTS[point], kill)
        # A kill undoes nothing.
        cut.setattr(ShardStore, "remove", ShardStore.close)
        with pytest.raises(Killed):
            ranks_run(model, output, [], 3, resume=True, **OPTIONS)
    _, found = ranks_run(model, output, BATCHES[2:], then, resume=True, **OPTIONS)
    assert equal(found, weights)
    assert len(list(tmp_path.glob("ranks-rank-*"))) == then - 1
    assert len(list(output.glob("headrace-*"))) == 1, "no data of another store are left"


@pytest.mark.wide
def test_a_part_that_is_not_here_is_named(model: Path, tmp_path: Path) -> None:
    _, plan = alone(model, tmp_path / "local")
    output = tmp_path / "ranks"
    ranks_run(model, output, BATCHES[:1], 3, plan=plan, **OPTIONS)
    (away,) = tmp_path.glob("ranks-rank-2-*")
    shutil.move(away, tmp_path / "elsewhere")
    with pytest.raises(RunDirectoryError, match=r"ranks-rank-2-.* a rank's part of the state is not here .* with 3 ranks"):
        ranks_run(model, output, [], 2, resume=True, **OPTIONS)
    shutil.move(tmp_path / "elsewhere", away)
    with pytest.raises(ConfigError, match="too few for 5 ranks"):
        ranks_run(model, output, [], 5, resume=True, **OPTIONS)
    assert manifest.read_manifest(output).identity["ranks"] == "3"
