"""On a GPU coded weights are decoded to the host's bits, by Triton's kernels where Triton works, and by torch operations."""

import importlib.util

import kernel_cases
import pytest
import torch
from kernel_cases import bits, codec, matrices, moved

from headrace.codec import on_device
from headrace.codec.ternary import TritsCodec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", kernel_cases.CASES, ids=lambda case: case.__name__)
def test_a_kernel(case, gpu: torch.device) -> None:
    kernels = on_device.triton_kernels(gpu)
    if kernels is None and importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton here")
    assert kernels is not None, "Triton is here, and does not work"
    case(kernels, gpu)


@pytest.mark.parametrize("with_triton", [True, False])
def test_codes_decode_to_the_bits_of_the_host_in_the_memory_that_they_say(
    with_triton: bool, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_triton:
        monkeypatch.setattr("headrace.codec.ternary.triton_kernels", lambda device: None)
    for symbols, levels in matrices():
        for code in (codec(), TritsCodec()):
            parts, (rows, columns) = code.encode_symbols(symbols, levels), symbols.shape
            expected, into = torch.empty(rows, columns), torch.empty(rows, columns, device=gpu)
            there = moved(parts, gpu)
            code.decode(parts, expected, range(rows))
            before = torch.cuda.memory_allocated(gpu)
            torch.cuda.reset_peak_memory_stats(gpu)
            code.decode(there, into, range(rows))
            assert bits(into).equal(bits(expected))
            most = code.decoding_bytes(rows, columns, on_host=False)
            assert torch.cuda.max_memory_allocated(gpu) - before <= most + 64 * 512  # an allocation is of whole 512 bytes
