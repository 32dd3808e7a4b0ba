"""Weights that stay in their codes: products near those of decoded weights, counted bytes, and the same bits in each way.

Run: pytest tests/compress/test_packed_products.py
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answered_jobs import answered

from headrace.codec import Parts
from headrace.codec.published import PackQuantized, packed
from headrace.codec.published.packed import PackedMatrix
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.generate.plan import search
from headrace.generate.plan.plan import FewRows, GenerationPlan
from headrace.model.seats.coded_check import in_code
from headrace.model.stored.operand import CodedOperand, Workspace
from headrace.terms.errors import ModelError
from headrace.terms.options.budget import Budget

needs_kernel = pytest.mark.skipif(
    not packed.has_packed_kernel(), reason="torch has no product with four bits for this processor"
)
ROWS = (tuple(range(7, 10)), tuple(range(40, 43)))
SETTINGS = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
JOB: dict[str, Any] = {"compute_dtype": "bfloat16", "max_new_tokens": 16}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}


def plan_of(generator: Generator, **more: Any) -> GenerationPlan:
    return generator.plan_only(2, 3, 20, **more)


def logits_of(directory: Path, packed_products: bool | None, interpreter: str = "overlapped", **changes: Any) -> torch.Tensor:
    """Return the logits (tokens, rows, vocabulary) of two rows, computed by a plan with these `changes`."""
    budget = Budget(host="4GiB")
    with Generator.open(
        directory, budget, compute_dtype="bfloat16", rows=2, interpreter=interpreter, packed_products=packed_products
    ) as generator:
        generator.use(replace(plan_of(generator), **changes))
        (done,) = generator.run([SeatRows(0, ROWS, 1, generator.model.settings(3, None, {**SETTINGS, **LOGITS}))])
        return torch.stack(done.raw.logits)


@needs_kernel
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(16, 32, 32), (208, 1536, 128), (576, 512, 256), (4160, 64, 64)])
def test_a_product_is_that_of_decoded_weights_within_roundings(outputs: int, inputs: int, group: int) -> None:
    torch.manual_seed(1)
    codec = PackQuantized(group)
    parts = codec.encode(torch.randn(outputs, inputs).bfloat16())
    decoded = torch.empty(outputs, inputs, dtype=torch.bfloat16)
    codec.decode(parts, decoded, range(outputs))
    matrix = PackedMatrix(parts, group)
    for rows in (1, 3, 17, 32):
        values = torch.randn(rows, inputs).bfloat16()
        exact = values.double() @ decoded.double().T
        # A weight may be rounded to bfloat16 or not (2^-8 of it), the sum is in float32, and the result is rounded (2^-8).
        terms = values.double().abs() @ decoded.double().abs().T
        bound = (2**-8 + inputs * 2**-24) * terms + 2**-8 * exact.abs()
        assert bool(((matrix.multiply(values).double() - exact).abs() <= bound * (1 + 2**-8)).all())
    assert matrix.num_bytes == outputs * inputs // 2 + 4 * outputs * (inputs // group)


def packed_by_torch(parts: Parts, inputs: int) -> torch.Tensor:
    """Return the packed matrix of a symmetric code, in one call of torch's own function."""
    codes = packed.unpack(parts["weight_packed"], inputs).int()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)


@needs_kernel
@pytest.mark.parametrize(("outputs", "inputs"), [(4160, 128), (16, 32), (48, 64), (112, 160), (1120, 2048)])
@pytest.mark.parametrize("by_loop", [True, False])
def test_pieces_are_packed_as_the_whole(outputs: int, inputs: int, by_loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = PackQuantized(32).encode(torch.randn(outputs, inputs).bfloat16())  # ends of 16 to 48 rows, and more than a piece
    if not by_loop:
        monkeypatch.setattr(packed, "_block_of_loop", lambda: 0)
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert torch.equal(PackedMatrix(parts, 32)._packed, packed_by_torch(parts, inputs))


@pytest.mark.process
@needs_kernel
def test_the_layout_of_shorter_registers_is_packed_too() -> None:
    script = "from headrace.codec.published import packed; print(packed.has_packed_kernel(), packed._block_of_loop())"
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["True", "32"], done.stderr


@needs_kernel
def test_another_layout_of_torch_is_packed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed._block_of_loop() in (32, 64), "the loop packs as torch does on the processors where it has a kernel"
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu

    class Other:  # the halves of each byte exchanged
        def _convert_weight_to_int4pack_for_cpu(self, codes: torch.Tensor, tiles: int) -> torch.Tensor:
            found = convert(codes, tiles)
            return found << 4 | found >> 4

    monkeypatch.setattr(packed, "_aten", Other())
    assert packed._block_of_loop.__wrapped__() == 0


def test_generation_uses_them_and_stays_near(dense_int4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    coded, rows_seen = dense_int4[0] / "out", []
    rows_times = CodedOperand.rows_times

    def counted(matrix: CodedOperand, rows: torch.Tensor, *, transposed: bool) -> torch.Tensor | None:
        found = rows_times(matrix, rows, transposed=transposed)
        rows_seen.append((rows.numel() // rows.shape[-1], found is not None))
        return found

    decoded = logits_of(coded, False)
    monkeypatch.setattr(CodedOperand, "rows_times", counted)
    few = logits_of(coded, True)
    assert set(rows_seen) == {(2, True), (6, True)}, "two rows, and the prompt's six"
    # Before texts part, the logits differ as much as bfloat16 products in another order do, and not in every bit.
    first = (few[0].double() - decoded[0].double()).norm() / decoded[0].double().norm()
    assert 0 < float(first) < 2**-5


@pytest.mark.parametrize("way", [{}, pytest.param({"host_slots": 2, "prefetch": 1}, marks=pytest.mark.wide)])
def test_where_no_codes_are_multiplied_bits_are_those_of_decoded_weights(
    dense_int4: Any, way: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    coded = dense_int4[0] / "out"
    decoded = logits_of(coded, False)
    monkeypatch.setattr(CodedOperand, "rows_times", lambda matrix, rows, *, transposed: None)
    assert torch.equal(logits_of(coded, True, **way), decoded)


def test_experts_stay_in_their_codes_too(mixture_int4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    coded, shapes = mixture_int4[0] / "out", set()
    decoded = logits_by_experts(coded, False)
    rows_times = CodedOperand.rows_times

    def noted(matrix: CodedOperand, rows: torch.Tensor, *, transposed: bool) -> torch.Tensor | None:
        shapes.add(tuple(matrix.shape))
        return rows_times(matrix, rows, transposed=transposed)

    monkeypatch.setattr(CodedOperand, "rows_times", noted)
    few = logits_by_experts(coded, True)
    first = (few[0].double() - decoded[0].double()).norm() / decoded[0].double().norm()
    assert 0 < float(first) < 2**-4
    assert len(shapes) > 1
    monkeypatch.setattr(CodedOperand, "rows_times", lambda matrix, rows, *, transposed: None)
    assert torch.equal(logits_by_experts(coded, True), decoded)


def logits_by_experts(directory: Path, packed_products: bool) -> torch.Tensor:
    """Return logits of a mixture whose experts come by themselves."""
    with Generator.open(
        directory, Budget(host="4GiB"), compute_dtype="bfloat16", rows=2, packed_products=packed_products
    ) as generator:
        with pytest.MonkeyPatch.context() as patch:
            every = search.ways_of_experts
            patch.setattr(
                search, "ways_of_experts", lambda *given: (each for each in every(*given) if each.experts is not None)
            )
            plan = plan_of(generator)
        assert plan.experts is not None
        assert (plan.packed_rows > 0) is packed_products
        generator.use(plan)
        (done,) = generator.run([SeatRows(0, ROWS, 1, generator.model.settings(3, None, {**SETTINGS, **LOGITS}))])
        return torch.stack(done.raw.logits)


@pytest.mark.wide
def test_ways_to_run_a_plan_give_the_same_bits(dense_int4: Any) -> None:
    coded = dense_int4[0] / "out"
    one = logits_of(coded, True)
    assert torch.equal(one, logits_of(coded, True, "plain"))
    assert torch.equal(one, logits_of(coded, True, host_slots=2, prefetch=1))


@needs_kernel
def test_plans_count_their_bytes_and_choose(dense_int4: Any) -> None:
    with Generator.open(dense_int4[0] / "out", Budget(host="4GiB"), compute_dtype="bfloat16") as generator:
        decoded, asked = (plan_of(generator, few_rows=FewRows(packed=packed)) for packed in (False, True))
        assert decoded.packed_rows == 0
        assert asked.packed_rows == 8
        assert "in their codes" in asked.explain()
        assert asked.results.peak_bytes["host"]["weights"] < decoded.results.peak_bytes["host"]["weights"]
        assert generator.plan_only(2, 3, 2).packed_rows == 0, "too few passes"
        generator.use(asked)
        (_,) = generator.run([SeatRows(0, ROWS, 1, generator.model.settings(3, None, SETTINGS))])
        in_codes = generator.model.source.in_codes
        assert in_codes is not None
        kept = sum(matrix.num_bytes for matrix in in_codes.workspace.packed.values())
        assert asked.results.peak_bytes["host"]["packed"] == kept > 0


def test_whoever_uses_a_matrix_in_its_code_otherwise_is_told() -> None:
    matrix = in_code(torch.randn(5, 8), Workspace(torch.float32))
    with pytest.raises(ModelError, match="add is asked of a matrix that stays in its code"):
        torch.add(torch.ones(8), matrix)  # type: ignore[call-overload]


def test_without_a_kernel_of_torch_loops_multiply(dense_int4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "has_packed_kernel", lambda: False)
    decoded, few = (logits_of(dense_int4[0] / "out", each) for each in (False, True))
    assert 0 < float((few[0].double() - decoded[0].double()).norm() / decoded[0].double().norm()) < 2**-5


@pytest.mark.wide
@needs_kernel
def test_a_job_goes_on_as_it_was_begun(dense_int4: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coded = dense_int4[0] / "out"
    whole = answered(coded, tmp_path / "whole", **JOB, packed_products=True)
    with pytest.raises(KeyboardInterrupt):
        answered(coded, tmp_path / "killed", most=1, **JOB, packed_products=True)
    assert answered(coded, tmp_path / "killed", **JOB, packed_products=None) == whole
    with pytest.raises(KeyboardInterrupt):
        answered(coded, tmp_path / "other", most=1, **JOB, packed_products=False)
    monkeypatch.setattr(CodedOperand, "rows_times", None)  # the plan alone would choose it
    answered(coded, tmp_path / "other", **JOB, packed_products=None)
    with pytest.raises(TypeError):
        answered(coded, tmp_path / "new", **JOB, packed_products=None)
