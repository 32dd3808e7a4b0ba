"""Keys and values in tiers: the bits of `generate`, whether they wait where compute is, in host memory or on drives."""

import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import job_with_caches
import pytest
import torch
from forked import PROCESSES
from hypothesis import given, settings
from hypothesis import strategies as st
from job_with_caches import in_tiers, job
from some_prompts import prompts
from test_banks import with_banks
from test_generation_search import question
from tiers import sampled

from headrace.files import DirectFile
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import Generated, SeatRows
from headrace.generate.plan.cache_plan import HOST, SSD, CachePlan, with_inputs
from headrace.generate.plan.schedule import build_pass
from headrace.generate.plan.search import make_generation_plan
from headrace.machine.cpu import CpuMachine
from headrace.model.kernels.products import WideProducts
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.errors import DiskFull
from headrace.terms.lanes import Lane
from headrace.terms.options.budget import Budget
from headrace.terms.program import Pool
from headrace.terms.sizes import PAGE_BYTES
from headrace.testing.faulty_file import Fault, FaultKind, FaultyFile

NEW = 12
COMMON = {
    "max_new_tokens": NEW,
    "pad_token_id": 0,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
}
# Homes of caches, block by block and again from the first, and whether there is a device of its own.
PLACES = {"drives": ((SSD,), False), "host": ((HOST,), True), "all": (("compute", SSD, HOST), True)}


def micro_batches(settings: dict[str, Any], longest: int = 40) -> list[SeatRows]:
    rows = [row * 4 for row in prompts(5)]
    assert max(map(len, rows)) <= longest
    return [
        SeatRows(number, tuple(map(tuple, rows[2 * number : 2 * number + 2])), 40 + number, settings) for number in range(3)
    ]


def generated(
    directory: Path,
    ssd: Path,
    dtype: str,
    place: str,
    asked: dict[str, Any],
    *,
    by_experts: bool = False,
    by_inputs: bool = False,
) -> list[Generated]:
    """Return what is generated with caches at `place`; `by_inputs`: prompts of all blocks whose caches move are inputs."""
    homes, device = PLACES[place]
    budget = Budget(host="4GiB", device="64MiB" if device else None, ssd=ssd)
    with Generator.open(directory, budget, compute_dtype=dtype, rows=2, seats=2) as generator:
        whole = generator.model.settings(48, None, asked)
        plan = generator.prepare(5, 48, NEW)
        tiered = [homes[block % len(homes)] if may else "compute" for block, may in enumerate(plan.costs.tiered)]
        assert any(home != "compute" for home in tiered)
        if by_experts:
            plan = with_banks(generator, plan, ahead_share=1.0)
        caches = CachePlan(homes=tuple(tiered), slots=2, page_bytes=PAGE_BYTES)
        if by_inputs:
            *_, caches = with_inputs(caches, plan.costs)
            assert len(caches.inputs) == len(tiered) - tiered.count("compute")
        generator.use(replace(plan, caches=caches))
        return sorted(generator.run(micro_batches(whole, 48)), key=lambda done: done.batch.number)


CASES = [
    (name, place, way, dtype)
    for name in ("llama", "deepseek-v3", "gpt-oss", "qwen3-moe")
    for place in PLACES
    for way in WAYS
    for dtype in ("float32", "bfloat16")
]
FEW = [("llama", "drives", "sampled", "float32"), ("gpt-oss", "all", "greedy", "bfloat16")]


@pytest.mark.parametrize(("name", "place", "way", "dtype"), sampled(CASES, FEW))
def test_caches_in_tiers_give_the_bits_of_generate(
    name: str, place: str, way: str, dtype: str, directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    asked, directory = {**COMMON, **WAYS[way]}, directory_of(name, dtype)
    for each in generated(directory, tmp_path, dtype, place, asked):
        with _arithmetic(dtype):
            expected = stock(directory, dtype, each.batch.rows, each.batch.seed, asked)
        assert torch.equal(each.raw.sequences, expected.sequences)
        for one, other in zip(each.raw.logits, expected.logits, strict=True):
            assert torch.equal(one, other)
    assert not list(tmp_path.iterdir())


def test_experts_that_come_by_themselves_have_caches_in_tiers(
    directory_of: Callable[..., Path], stock: Callable[..., Any], tmp_path: Path
) -> None:
    asked, directory = {**COMMON, **WAYS["sampled"]}, directory_of("mixtral")
    for each in generated(directory, tmp_path, "float32", "all", asked, by_experts=True):
        expected = stock(directory, "float32", each.batch.rows, each.batch.seed, asked)
        assert torch.equal(each.raw.sequences, expected.sequences)


def write_prompts(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir()
        lines = "".join(json.dumps({"prompt": "water " * (1 + number % 3)}) + "\n" for number in range(9))
        (folder / "in.jsonl").write_text(lines, encoding="utf-8")


# In a pass each of 2 seats reads and writes 2 blocks: within the prompts, the last answers, and where new seats come in.
KILLS = [("write", 2, False), ("write", 13, False), ("write", 22, False), ("read", 3, False), ("read", 35, False)]
KILLS += [("read", 80, False), ("write", 3, True), ("read", 9, True), ("read", 40, True)]  # with prompts as inputs
CODED_KILLS = [("keep", 4, "int4"), ("keep", 95, "int4"), ("keep", 70, "int8")]


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("kill", "number", "by_inputs"), sampled(KILLS, [("write", 22, False)]))
@pytest.mark.process
def test_a_job_whose_caches_lie_on_a_drive_goes_on_after_a_kill(
    kill: str, number: int, by_inputs: bool, model: Path, tmp_path: Path
) -> None:
    goes_on_after_a_kill(model, tmp_path, kill, number, by_inputs=by_inputs)


@pytest.mark.timeout(280)
@pytest.mark.parametrize(("kill", "number", "code"), sampled(CODED_KILLS, CODED_KILLS[1:2]))
@pytest.mark.process
def test_a_job_whose_caches_are_coded_goes_on_after_a_kill(
    kill: str, number: int, code: str, model: Path, tmp_path: Path
) -> None:
    """What was answered beside the drive, and what is answered with caches on it, has the same bytes."""
    goes_on_after_a_kill(model, tmp_path, kill, number, code=code)


def goes_on_after_a_kill(
    model: Path, tmp_path: Path, kill: str, number: int, *, by_inputs: bool = False, code: str | None = None
) -> None:
    write_prompts(tmp_path / "kept", tmp_path / "killed")
    assert job(model, tmp_path / "kept", None, code) == 0
    process = PROCESSES.Process(
        target=job_with_caches.main, args=(str(model), str(tmp_path / "killed"), kill, number, by_inputs, code)
    )
    process.start()
    process.join(250)
    assert process.exitcode == -signal.SIGKILL, "the moment never came"
    assert {path.name for path in (tmp_path / "killed").iterdir()} <= {"in.jsonl", "out.jsonl.job"}  # the drive is free again
    with pytest.MonkeyPatch.context() as patch:
        in_tiers(patch, by_inputs=by_inputs)
        assert job(model, tmp_path / "killed", tmp_path / "killed", code) == 0
    kept, killed = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("kept", "killed"))
    assert kept == killed


@pytest.mark.wide
def test_a_drive_that_is_full_loses_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is reserved first; where a file system gives none all the same, what is done is kept, and the job goes on later."""
    write_prompts(tmp_path / "kept", tmp_path / "full")
    assert job(model, tmp_path / "kept", None) == 0

    nameless = DirectFile.nameless

    def failing(directory: Path, size: int, what: str = "trial file") -> Any:
        file = nameless(directory, size, what)
        script = [Fault(verb="write", call=22, kind=FaultKind.NO_SPACE)]
        return FaultyFile(file, script) if what == "keys and values" else file

    in_tiers(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("headrace.generate.passes.seat_caches.DirectFile.nameless", failing)
        with pytest.raises(DiskFull, match=r"keys and values.*what is done is kept"):
            job(model, tmp_path / "full", tmp_path)
    assert not (tmp_path / "full/out.jsonl").exists()
    assert (tmp_path / "full/out.jsonl.job/done.jsonl").stat().st_size
    assert job(model, tmp_path / "full", tmp_path) == 0
    kept, full = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("kept", "full"))
    assert kept == full


def test_a_drive_without_space_is_refused_before_anything_is_computed(
    directory_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        if size > 8192:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.files.direct.os.posix_fallocate", full)
    with pytest.raises(DiskFull, match="keys and values"):
        generated(directory_of("llama"), tmp_path, "float32", "drives", {**COMMON, **WAYS["greedy"]})
    assert not list(tmp_path.iterdir())


@pytest.mark.wide
@settings(max_examples=20)
@given(st.data())
def test_what_is_on_its_way_is_never_overwritten(data: st.DataObject) -> None:
    """A seat's cache is read after it was written in the pass before; no slot is taken before its last use is over."""
    separate = data.draw(st.booleans())
    homes = [HOST, SSD, "compute"] if separate else [SSD, "compute"]
    blocks, slots = [data.draw(st.sampled_from(homes)) for _ in range(4)], data.draw(st.integers(2, 4))
    asked = question(1 << 33, 8, 1 << 32 if separate else None)
    plan = make_generation_plan(replace(asked, rows=1, seats=4))
    plan = replace(plan, caches=CachePlan(homes=tuple(blocks), slots=slots))
    left, latest = Snapshot(), dict[Lane, tuple[int, int]]()
    last, done = dict[tuple[int, int, int], set[tuple[int, int]]](), dict[tuple[int, int], set[tuple[int, int]]]()
    for number in range(3):
        program, left = build_pass(plan, data.draw(st.integers(1, 4)), left)
        for op in program.ops:
            # All that is over before this operation begins: by program and index.
            over = {each for each in done if each[0] < number - 1}  # a program begins when the last but one is complete
            for known in (*((number, each) for each in op.after), *((number - 1, each) for each in op.after_previous)):
                over |= {known} | done[known]
            if op.lane.row.threads == 1 and op.lane in latest:  # it ends its operations in order
                over |= {latest[op.lane]} | done[latest[op.lane]]
            latest[op.lane] = (number, op.index)
            done[number, op.index] = over
            for pool in (Pool.CACHE_HOST, Pool.CACHE_DEVICE):
                if (slot := op.slot(pool)) >= 0:
                    users = last.setdefault((pool, slot, -1), set())
                    assert users <= over
                    last[pool, slot, -1] = {(number, op.index)}
            if op.slot(Pool.CACHE) >= 0:
                found = (Pool.CACHE, op.unit, op.micro)
                assert last.get(found, set()) <= over
                last[found] = {(number, op.index)}


def _arithmetic(dtype: str) -> AbstractContextManager[object]:
    return nullcontext() if dtype == "float32" or CpuMachine().multiplies(dtype) else WideProducts()
