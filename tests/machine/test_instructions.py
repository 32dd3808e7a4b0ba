"""What a processor multiplies is read from what the kernel says of it.

Run: pytest tests/machine/test_instructions.py
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.machine.cpu import CpuMachine, processor_flags

X86 = "processor\t: 0\nmodel name\t: some\nflags\t\t: fpu avx512f {}\n\nprocessor\t: 1\nflags\t\t: fpu avx512f {}\n"
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    processor_flags.cache_clear()
    yield
    processor_flags.cache_clear()


@pytest.mark.parametrize(
    ("text", "bfloat16", "float16"),
    [
        (X86.format("avx512_vnni", "avx512_vnni"), False, False),
        (X86.format("avx512_bf16", "avx512_bf16"), True, False),
        (X86.format("amx_bf16 amx_tile", "amx_bf16"), True, False),
        (X86.format("avx512_bf16 avx512_fp16", ""), True, True),
        (ARM.format("asimdhp"), False, True),
        (ARM.format("asimdhp bf16"), True, True),
        ("processor\t: 0\n", True, True),  # says nothing: torch decides
        ("", True, True),
    ],
)
def test_the_kernel_lists_instructions(text: str, bfloat16: bool, float16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, *args, **kwargs: text)
    machine = CpuMachine()
    assert (machine.multiplies("bfloat16"), machine.multiplies("float16")) == (bfloat16, float16)
    assert machine.multiplies("float32")


def test_a_kernel_without_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path, *args: object, **kwargs: object) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert CpuMachine().multiplies("bfloat16")
