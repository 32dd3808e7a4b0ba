"""A mixture compressed with one expert in memory at a time becomes the same files as with whole blocks."""

from functools import partial
from pathlib import Path

import pytest
from compressing import options, run
from tiers import sampled

from headrace.compress import run as compression
from headrace.compress.planner import plan_compression
from headrace.compress.quantiser import Quantiser
from headrace.terms.options.budget import Budget


@pytest.mark.wide
@pytest.mark.parametrize("to", sampled(["ternary", "int4"], ["ternary"]))
def test_the_bytes_are_those_of_whole_blocks(to: str, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for by_experts in (False, True):
        monkeypatch.setattr(compression, "Quantiser", partial(Quantiser, by_experts=by_experts))
        found.append(run(mixture, tmp_path / str(by_experts), to=to, experts_only=True, group_size=64))
    whole, apart = (each.output for each in found)
    names = sorted(path.name for path in whole.glob("*.safetensors"))
    assert names
    for name in names:
        assert (whole / name).read_bytes() == (apart / name).read_bytes()
    assert found[0].reports == found[1].reports
    assert found[0].loss_after == found[1].loss_after


def test_too_little_memory_is_said_as_a_plan_says_it(dense: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    compression.compress_model(options(dense, tmp_path, host_memory="8MiB"), say=lines.append)
    planned = plan_compression(dense, "int4", "a6000-1ssd", budget=Budget(host="8MiB"))
    assert [line.split(":")[0] for line in lines if "at least" in line] == ["host memory"]
    assert planned.warning
