"""Whole runs over loopback: a node in this thread, learners in others. What they end with follows from what they were given."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiers import sampled

from headrace.peers.meet.address import Address
from headrace.peers.meet.lane import Channel
from headrace.peers.node.run import serve
from headrace.peers.node.working import work
from headrace.runs.loop import train
from headrace.terms.errors import ConfigError
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import NodeOptions, RunOptions


class Learners:
    """Learners in threads of this process, each with a directory of its own; what one raises is raised by `join`."""

    def __init__(self, folder: Path, number: int, model: Path | None = None) -> None:
        self._folder, self._number, self._model = folder, number, model
        self._threads, self.errors = list[threading.Thread](), list[BaseException]()

    def hire(self, address: Address) -> None:
        for number in range(self._number):
            ssd = self._folder / f"ssd-{number}"
            ssd.mkdir()
            self._threads.append(threading.Thread(target=self._work, args=(address, ssd), daemon=True))
            self._threads[-1].start()

    def _work(self, address: Address, ssd: Path) -> None:
        try:
            work(address, Options(host_memory="2GiB", ssd=(ssd,)), name=ssd.name, wait_seconds=5.0, model=self._model)
        except BaseException as error:
            self.errors.append(error)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(200)

    def join(self) -> None:
        self.wait()
        assert self.errors == []


def run(config: NodeOptions, learners: int = 1, model: Path | None = None) -> dict[str, torch.Tensor]:
    """Run a node with learners to the end, and return the final weights."""
    folder = Path(str(config.output)).with_name(f"{Path(str(config.output)).name}-learners")
    folder.mkdir()
    made = Learners(folder, learners, model)
    finished = serve(config, silence_seconds=20.0, listening=made.hire)
    made.join()
    assert [list(each.iterdir()) for each in folder.iterdir()] == [[]] * learners, "learners leave nothing"
    assert not (finished.run_directory / "exchange").exists()
    return weights_of(finished.final)


def weights_of(final: Path) -> dict[str, torch.Tensor]:
    return load_file(next(final.glob("*.safetensors")))


ALONE = {"outer": "sgd:momentum=0", "outer_learning_rate": 1.0}


def test_one_learner_without_momentum_is_the_local_run_to_one_rounding(
    tmp_path: Path, options: Callable[..., NodeOptions], place: Path
) -> None:
    config = options(tmp_path / "run", max_steps=3, **ALONE)
    merged, before = run(config), weights_of(place / "model")
    own = {key: value for key, value in vars(config).items() if key in RunOptions.keys()}  # noqa: SIM118
    alone = weights_of(train(RunOptions(**own | {"output": tmp_path / "alone", "measure": False})).final)
    moved = [(alone[name] - before[name]).abs() for name in alone]
    wrong = [(alone[name] - merged[name]).abs() for name in alone]
    assert max(float(each.max()) for each in moved) > 1e-3
    assert all((w <= 2**-8 * m + 2**-23 * alone[name].abs()).all() for w, m, name in zip(wrong, moved, alone, strict=True))
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in metrics] == [3]
    assert metrics[0]["learners"] == 1


METHODS = {
    "adamw": {},
    "bfloat16 states": {"optimizer": "adamw:moments=bfloat16"},
    "lion": {"optimizer": "lion"},
    "lomo": {"optimizer": "lomo"},
    "muon": {"optimizer": "muon"},
    "float32": {"compute_dtype": "float32"},
    "float16": {"compute_dtype": "float16"},
    "lora": {"adapter": "lora:rank=4", "learning_rate": 1e-2},
    "dora": {"adapter": "dora:rank=4", "learning_rate": 1e-2},
    "lsp": {"gradient": "lsp:check=2"},
    "matrices": {"train": "matrices"},
    "table": {"adapter": "table", "learning_rate": 1e-2},
    "changes in int8": {"exchange_dtype": "int8"},
}


@pytest.mark.parametrize("name", sampled(METHODS, []))
def test_every_method_learns_alone_and_meets(name: str, tmp_path: Path, options: Callable[..., NodeOptions]) -> None:
    """Within the roundings of three merges, one learner ends as the run on one machine; LSP meets by another way."""
    config = options(tmp_path / "run", max_steps=6, local_steps=3, **ALONE, **METHODS[name])
    merged = run(config)
    own = {key: value for key, value in vars(config).items() if key in RunOptions.keys()}  # noqa: SIM118
    alone = weights_of(train(RunOptions(**own | {"output": tmp_path / "alone", "measure": False})).final)
    wrong = sum(float((alone[each] - merged[each]).square().sum()) for each in alone) ** 0.5
    size = sum(float(alone[each].square().sum()) for each in alone) ** 0.5
    # Lion's signs turn where a gradient is near zero; a table's tokens choose other rows.
    assert wrong <= {"lsp": 2e-2, "lion": 1e-2, "table": 5e-2}.get(name, 2e-3) * size


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 4), ("int8", 2)])
def test_a_learner_moves_few_bytes_for_each_number_in_each_round(
    dtype: str,
    width: int,
    tmp_path: Path,
    place: Path,
    options: Callable[..., NodeOptions],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved, real = [0], Channel.send

    def send(lane: Channel, data: Any, to: int) -> None:
        moved[0] += data.size
        real(lane, data, to)

    monkeypatch.setattr(Channel, "send", send)
    taken = dict[int, int]()
    for merges in (2, 6):
        moved[0] = 0
        final = run(options(tmp_path / f"run-{merges}", max_steps=merges, local_steps=1, exchange_dtype=dtype))
        taken[merges] = moved[0]
    moved[0] = 0
    has_model = run(options(tmp_path / "run", max_steps=2, local_steps=1, exchange_dtype=dtype), model=place / "model")
    assert moved[0] < taken[2] - (place / "model" / "model.safetensors").stat().st_size, "its own files are taken"
    assert has_model.keys() == final.keys()
    numbers = sum(each.numel() for each in final.values())
    assert (taken[6] - taken[2]) / 4 <= 1.02 * width * numbers


def test_a_learner_without_a_drive_is_refused(tmp_path: Path, options: Callable[..., NodeOptions]) -> None:
    from headrace.peers.local_steps.learner import Learning
    from headrace.runs.protocols import NoDisplay

    with pytest.raises(ConfigError, match="ssd: a learner keeps a run of its own"):
        Learning(Options(), NoDisplay())
