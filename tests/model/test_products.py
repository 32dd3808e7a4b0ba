"""Products of 16-bit numbers by way of float32 are the products, rounded once; everything else passes untouched.

Run: pytest tests/model/test_products.py
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import headrace.model.kernels.products as products
from headrace.model import Chain, MicroBatch, Record, Replay, WideProducts, profile
from headrace.terms.options.optimizer import Optimizer

NARROW = (torch.bfloat16, torch.float16)
HIDDEN, LENGTH = 64, 48


class Seen(TorchDispatchMode):
    """Writes down the dtypes in which products are really computed, and the largest tensor in float32."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []
        self.largest_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is torch.float32:
            self.largest_elements = max(self.largest_elements, out.numel())
        if func in products._PRODUCTS or func is torch.ops.aten.addmm_.default:
            self.dtypes.append(next(value.dtype for value in args if isinstance(value, torch.Tensor)))
        return out


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, transposed: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    order = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    made = torch.randn(order, generator=generator).to(dtype)
    return made.transpose(-1, -2) if transposed else made


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, terms: int) -> None:
    """Half a place of the result's own dtype, and what float32 loses over so many terms of about one."""
    assert found.dtype in NARROW
    allowed = torch.finfo(found.dtype).eps / 2 * exact.abs() + torch.finfo(torch.float32).eps * 8 * (terms + 1) + 2.0**-24
    assert (found.double() - exact).abs().le(allowed).all()


sides = st.integers(0, 40)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NARROW), sides, sides, sides, st.booleans(), st.booleans(), st.sampled_from([64, 1024, 1 << 23]))
def test_a_product_is_the_exact_one_rounded(
    dtype: torch.dtype, rows: int, inner: int, columns: int, left_turned: bool, right_turned: bool, piece_bytes: int
) -> None:
    left = numbers((rows, inner), dtype, 1, transposed=left_turned)
    right = numbers((inner, columns), dtype, 2, transposed=right_turned)
    bias = numbers((1, columns), dtype, 3)[0]
    with pytest.MonkeyPatch.context() as patch, WideProducts():
        patch.setattr(products, "_PIECE_BYTES", piece_bytes)
        plain = left @ right
        added = torch.addmm(bias, left, right)
        scaled = torch.addmm(bias, left, right, beta=0.5, alpha=-2.0)
    exact = left.double() @ right.double()
    assert_rounded_once(plain, exact, inner)
    assert_rounded_once(added, exact + bias.double(), inner)
    assert_rounded_once(scaled, 0.5 * bias.double() - 2 * exact, 2 * inner)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NARROW), st.integers(0, 5), sides, sides, sides, st.sampled_from([64, 4096, 1 << 23]))
def test_products_of_batches_are_exact_ones_rounded(
    dtype: torch.dtype, batch: int, rows: int, inner: int, columns: int, piece_bytes: int
) -> None:
    left, right = numbers((batch, rows, inner), dtype, 1), numbers((batch, inner, columns), dtype, 2)
    bias = numbers((batch, rows, columns), dtype, 3)
    with pytest.MonkeyPatch.context() as patch, WideProducts():
        patch.setattr(products, "_PIECE_BYTES", piece_bytes)
        plain, added = torch.bmm(left, right), torch.baddbmm(bias, left, right, beta=2.0)
    exact = left.double() @ right.double()
    assert_rounded_once(plain, exact, inner)
    assert_rounded_once(added, exact + 2 * bias.double(), inner)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), sides, sides)
def test_products_of_experts_are_exact_ones_rounded(sizes: list[int], inner: int, columns: int) -> None:
    rows, dtype = sum(sizes), torch.bfloat16
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    hidden, experts = numbers((rows, inner), dtype, 1), numbers((len(sizes), inner, columns), dtype, 2)
    gradient = numbers((rows, columns), dtype, 3)
    grouped = products._grouped_mm  # torch itself wants sides that are multiples of 16 bytes
    out, weights = grouped(hidden, experts, ends), grouped(hidden.t(), gradient, ends)
    turned = grouped(experts.transpose(1, 2), hidden.t(), ends)
    assert out.shape == (rows, columns)
    assert weights.shape == experts.shape
    assert turned.shape == (columns, rows)
    for group, stop in enumerate(ends.tolist()):
        part = slice(stop - sizes[group], stop)
        assert_rounded_once(out[part], hidden[part].double() @ experts[group].double(), inner)
        assert_rounded_once(weights[group], hidden[part].double().t() @ gradient[part].double(), sizes[group])
        assert_rounded_once(turned[:, part], (hidden[part].double() @ experts[group].double()).t(), inner)


def test_products_of_experts_with_gradients() -> None:
    ends, sizes = torch.tensor([8, 8, 24], dtype=torch.int32), (8, 0, 16)
    hidden = numbers((24, 16), torch.bfloat16, 1).requires_grad_()
    experts = numbers((3, 16, 32), torch.bfloat16, 2).requires_grad_()
    gradient = numbers((24, 32), torch.bfloat16, 3)
    with Seen() as seen, WideProducts():
        out = torch._grouped_mm(hidden, experts, ends)
        found = torch.autograd.grad([out], [hidden, experts], [gradient])
    assert set(seen.dtypes) == {torch.float32}
    exact = [value.detach().double().requires_grad_() for value in (hidden, experts)]
    parts = zip(exact[0].split(sizes), exact[1], strict=True)
    want = torch.cat([rows @ weight for rows, weight in parts])
    for got, expected in zip(found, torch.autograd.grad([want], exact, [gradient.double()]), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients(dtype: torch.dtype, masked: bool) -> None:
    wide = [numbers((2, 3, 20, 8), dtype, seed).requires_grad_() for seed in range(3)]
    exact = [value.detach().double().requires_grad_() for value in wide]
    mask = torch.rand(20, 20, generator=torch.Generator().manual_seed(9)) < 0.7
    mask |= torch.eye(20, dtype=torch.bool)
    options: dict[str, Any] = {"attn_mask": mask} if masked else {"is_causal": True}
    gradient = numbers((2, 3, 20, 8), dtype, 5)
    with Seen() as seen, WideProducts():
        found = scaled_dot_product_attention(*wide, **options)
        gradients = torch.autograd.grad([found], wide, [gradient])
    assert set(seen.dtypes) == {torch.float32}
    want = scaled_dot_product_attention(*exact, **options)
    wanted = torch.autograd.grad([want], exact, [gradient.double()])
    for got, expected in zip((found.detach(), *gradients), (want.detach(), *wanted), strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_a_large_product_takes_pieces_of_float32_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_PIECE_BYTES", 4096)
    weight, hidden = numbers((700, 32), torch.bfloat16, 1), numbers((16, 32), torch.bfloat16, 2)
    with Seen() as seen, WideProducts():
        logits = hidden @ weight.t()
        weight_gradient = logits.t() @ hidden
        hidden_gradient = logits @ weight
    assert weight_gradient.shape == weight.shape
    assert hidden_gradient.shape == hidden.shape
    assert seen.largest_elements <= 1024
    assert len(seen.dtypes) > 60


def test_what_is_no_product_of_16_bit_numbers_passes_untouched() -> None:
    wide, whole = torch.randn(8, 8), torch.arange(64).reshape(8, 8)
    with Seen() as seen, WideProducts():
        assert torch.equal(wide @ wide, torch.mm(wide, wide))
        assert torch.equal(whole @ whole, torch.mm(whole, whole))
        assert (wide.double() @ wide.double()).dtype is torch.float64
        meta = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
        assert (meta @ meta).dtype is torch.bfloat16
    assert seen.largest_elements <= 64


def chain(dtype: str) -> Chain:
    config = LlamaConfig(
        vocab_size=96, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return Chain.from_config(config, dtype, Optimizer())


def run_block(found: Chain, mode: Any, *, record: frozenset[int] = frozenset()) -> tuple[torch.Tensor, torch.Tensor]:
    """Return gradients of a block's input and weights; outputs at the ordinals in `record` come from a forward before."""
    dtype = found.dtype
    ids = torch.arange(LENGTH).reshape(1, LENGTH)
    flats = [
        (0.05 * torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(index))).to(dtype)
        for index, layout in enumerate(found.layouts)
    ]
    gradients = torch.zeros(flats[1].shape, dtype=torch.float32)

    def sink(parameter: Any, gradient: torch.Tensor) -> None:
        gradients[parameter.offset : parameter.offset + parameter.num_elements] += gradient.reshape(-1).float()

    hidden = numbers((LENGTH, HIDDEN), dtype, 4).reshape(1, LENGTH, HIDDEN)
    with mode:
        found.bind(0, flats[0], None)
        with torch.no_grad():
            call = found.prologue(MicroBatch(ids, ids)).calls[0]
        found.bind(1, flats[1], None)
        kept = Record(record)
        with torch.no_grad(), kept:
            found.block(0, hidden, call)
        found.bind(1, flats[1], sink)
        leaf = hidden.clone().requires_grad_()
        with torch.enable_grad():
            with Replay(kept.kept, names=kept.names):
                out = found.block(0, leaf, call).hidden
            torch.autograd.backward([out], [hidden])
    for unit in (0, 1):
        found.release(unit)
    assert leaf.grad is not None
    return leaf.grad, gradients


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_block_computes_what_it_does_without(dtype: str) -> None:
    ours, exact = chain(dtype), chain("float32")
    ours.multiply_wide()
    assert ours.wide_products
    assert dtype in ours.notes[0]
    for got, want in zip(run_block(ours, ours.arithmetic()), run_block(exact, exact.arithmetic()), strict=True):
        difference = (got.float() - want).abs().max() / want.abs().max()
        assert difference < (0.03 if dtype == "bfloat16" else 0.004)


def test_replayed_outputs_are_16_bit_numbers_and_change_no_gradient() -> None:
    ours = chain("bfloat16")
    ours.multiply_wide()
    plain = run_block(ours, ours.arithmetic())
    operators = profile(ours, 1, LENGTH).blocks[0].operators
    kept = run_block(ours, ours.arithmetic(), record=frozenset(range(len(operators))))
    assert all(torch.equal(got, want) for got, want in zip(kept, plain, strict=True))


@pytest.mark.wide
@pytest.mark.parametrize("piece_bytes", [2048, 1 << 23])
def test_the_profile_counts_what_float32_takes_and_nothing_else_changes(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_PIECE_BYTES", piece_bytes)
    narrow, wide = chain("bfloat16"), chain("bfloat16")
    wide.multiply_wide()
    before, after = profile(narrow, 1, LENGTH), profile(wide, 1, LENGTH)
    assert after.wide_products
    assert not before.wide_products
    for one, other in zip(before.blocks, after.blocks, strict=True):
        assert other.operators == one.operators  # outputs in 16 bits, the same operations
        assert other.forward_flops == one.forward_flops
        assert other.attention_flops == one.attention_flops
        # At least a piece of the largest product; the whole of it, its weight among others, where it is not cut.
        taken = min(piece_bytes, 4 * HIDDEN * 96)
        assert other.backward_workspace_bytes >= one.backward_workspace_bytes + taken
    assert after.epilogue_flops_per_token == before.epilogue_flops_per_token


def test_float32_has_no_wider_products() -> None:
    plain = chain("float32")
    plain.multiply_wide()
    assert not plain.wide_products
    assert not plain.notes


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("turned", [True, False])
def test_few_rows_are_multiplied_as_they_are_where_weights_are_stored_by_outputs(rows: int, turned: bool) -> None:
    """By shape and layout alone, so alike wherever weights lie; and rounded once, as others are."""
    left, right = numbers((rows, 200), torch.bfloat16, 1), numbers((200, 96), torch.bfloat16, 2, transposed=turned)
    with Seen() as seen, WideProducts():
        found = left @ right
    assert (torch.bfloat16 in seen.dtypes) is (turned and rows <= products.FEW_ROWS)
    assert_rounded_once(found, left.double() @ right.double(), 200)
    shifted = torch.empty(200 * 96 + 1, dtype=torch.bfloat16)[1:].view(96, 200) if turned else right
    with WideProducts():
        again = left @ (shifted.copy_(right.t()).t() if turned else right)
    assert torch.equal(again, found)
    with Seen() as seen, WideProducts():
        numbers((rows, 200), torch.float16, 1) @ numbers((200, 96), torch.float16, 2, transposed=turned)
    assert torch.float16 not in seen.dtypes
