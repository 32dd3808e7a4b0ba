"""What a forecast of a compression counts is what a compression does: sums of inputs, scales that are tried, passes of rows.

Run: pytest tests/compress/test_rounding_time.py
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import run, write_model
from tiers import sampled

from headrace.codec.grids import Int4Grid
from headrace.compress.forecast import Block, CodingWork, Matrices, side_by_side, terms
from headrace.compress.planner import plan_compression
from headrace.compress.rounding import BlockRounder
from headrace.compress.schedule import BlockFigures, MatrixGroup, ProgramFigures, build_block
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Verb

PLAIN: dict[str, Any] = {
    "name": "made up",
    "has_device": False,
    "device_memory_bytes": 0,
    "host_memory_bytes": 8 << 30,
    "cores": 2,
    "flops_per_second": {"bfloat16": 1e11, "float32": 5e10},
    "host_to_device_bytes_per_second": 1e10,
    "device_to_host_bytes_per_second": 1e10,
    "both_ways_bytes_per_second": 2e10,
    "host_memory_bytes_per_second": 2e10,
    "update_bytes_per_second": 2e10,
    "update_bytes_per_second_per_core": 1e10,
    "drives": [
        {
            "read_bytes_per_second": 2e9,
            "write_bytes_per_second": 1e9,
            "mixed_bytes_per_second": 2e9,
            "capacity_bytes": 10**12,
        }
    ],
}


def job(**changes: Any) -> CodingWork:
    matrices = [Matrices(1, 512, 512, 1.0, tries=16), Matrices(1, 512, 512, 1.0, tries=16, summed=False)]
    values: dict[str, Any] = {"tokens": 1 << 15, "hidden_bytes": 1024, "other_parameters": 1 << 20, "row_tokens": 256}
    return CodingWork(blocks=[Block(1 << 19, matrices, 1 << 18, 1)] * 4, **(values | {"vocabulary": 1000} | changes))


@pytest.mark.parametrize(("kind", "sums"), sampled([("llama", 4), ("opt", 4), ("phi3", 4), ("mixtral", 4)]))
def test_matrices_that_share_a_sum_are_those_of_a_run(
    kind: str, sums: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of a run of the tiny model are counted where they are used; experts of a mixture have theirs each."""
    more = {"opt": {"ffn_dim": 128, "word_embed_proj_dim": 64}, "phi3": {"pad_token_id": 0}}
    model = write_model(tmp_path / "model", kind, **more.get(kind, {}))
    seen: dict[str, set[int]] = {}
    rounded: Callable[..., None] = BlockRounder.round

    def noted(self: BlockRounder, parameter: Any, matrices: Any, caught: Any) -> None:
        for matrix in matrices:
            if matrix.expert in (None, 0) and matrix in caught.inputs:
                seen.setdefault(matrix.name.split("layers.")[1].split(".")[0], set()).add(id(caught.inputs[matrix].hessian))
        rounded(self, parameter, matrices, caught)

    monkeypatch.setattr(BlockRounder, "round", noted)
    run(model, tmp_path / "run", sequence_length=32, group_size=32)
    assert {len(each) for each in seen.values()} == {sums}
    found = plan_compression(model, "int4", Ceilings.from_json(PLAIN), tokens=4096)
    by_hand = {"llama": 3 * 64**2 + 96**2}  # less than a strip: whole squares
    if kind in by_hand:
        assert found.seconds["sums of inputs"] == pytest.approx(len(seen) * 2 * 4096 * by_hand[kind] / 5e10)


def test_so_many_scales_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid says how often it searches."""
    tried: list[int] = []
    error = Int4Grid._error

    def counted(self: Int4Grid, *values: torch.Tensor) -> torch.Tensor:
        tried.append(1)
        return error(self, *values)

    monkeypatch.setattr(Int4Grid, "_error", counted)
    grid = Int4Grid()
    grid.fit(torch.randn(1, 4, 128, dtype=torch.float64), torch.ones(1, 128))
    assert len(tried) == grid.tries


def test_rows_pass_as_often_as_the_program_lets_them() -> None:
    """The terms count what the lanes' program has: one pass that catches, one of coded weights, two of held-out rows."""
    lots, groups = 8, 3
    plan = ProgramFigures(blocks=[BlockFigures(groups=[MatrixGroup()] * groups)] * 2, calibrating=lots, held_out=lots // 4)
    passes, before = [], Snapshot()
    for block in range(2):
        program, before = build_block(plan, block, before)
        passes.append(sum(op.verb is Verb.FORWARD or (op.verb is Verb.CATCH and op.chunk > 0) for op in program.ops))
    assert passes[0] / lots == 1 + groups + job().passes_of_held_out
    assert passes[0] - passes[1] == lots, "behind the last block nobody reads calibrating rows"


def test_each_rate_has_its_terms() -> None:
    """Twice a rate halves what it bounds, and no other term. The simulated time is no shorter than all computing."""
    names = {
        "operator_seconds": set(),
        "logit_seconds": {"loss of held-out rows"},
        "launch_seconds": {"passes, before and after"},
        "cores": {"search of scales", "GPTQ, column by column", "encoding on the host's cores"},
    }
    machine = {**PLAIN, "operator_seconds": 1e-5, "logit_seconds": 1e-9, "launch_seconds": 1e-3}
    before = terms(job(), Ceilings.from_json(machine))
    for name, changed in names.items():
        after = terms(job(), Ceilings.from_json(machine | {name: machine[name] * (2 if name == "cores" else 0.5)}))
        assert {label for label in before if after[label] < before[label] * (1 - 1e-9)} == changed, name
    assert before["search of scales"] == pytest.approx(4 * 2 * 17 * 2 * 512 * 512 / 2e9)
    compute = {"passes, before and after", "sums of inputs", "GPTQ's factors and corrections", "search of scales"}
    assert side_by_side(job(), Ceilings.from_json(machine)) > sum(before[label] for label in compute)


def test_longer_rows_attend_to_more(tmp_path: Path) -> None:
    """As many tokens in longer rows take longer; the command passes on how long they are."""
    model = write_model(tmp_path / "model")
    short, long = (
        plan_compression(model, "int4", Ceilings.from_json(PLAIN), tokens=1 << 20, row_tokens=each) for each in (32, 4096)
    )
    assert short.seconds["passes, before and after"] < long.seconds["passes, before and after"]
    found = plan_compression(model, "int4", Ceilings.from_json(PLAIN), row_tokens=64)
    assert found.tokens == 128 * 64
    assert f"{128 * 64} calibration tokens, in rows of 64" in found.explain()
