"""The table of codes for weights: what each is called and is, what writes it, and how fast it is decoded.

To add a code, add a row (docs/extending.md, "A code for weights"). Whatever lists, chooses, plans or measures a code reads this
table. Invariant: a name is what its row says or is refused; nothing is taken for another code. Neither torch nor a codec is
imported before it is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.terms.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.codec.codec import Codec
    from headrace.codec.targets import DirectTarget, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherZeros:
    """The share of zeros that is `assumed` of a code's weights, and its `bits` with the share `otherwise`."""

    assumed: str
    otherwise: str
    bits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A code. `kind` is the first word of its codecs' names, by which weights that are to be decoded are counted.

    `words` say what it is, `files` how files with it are called. A matrix takes `bits` for each weight and `row_bits` for each
    row. If that depends on the weights' `zeros`, it is for a share that is assumed.
    `needs_data`: weights are rounded for the inputs of real data. `experts_alone`: plans take it for experts alone, where a
    model has stacks of them. `stock_loads`: transformers loads files with it. `target` makes what writes it, from the columns
    of a group; `direct` what writes it without rounding. Neither: it is only read. `lossless`: bfloat16 comes back, bit for
    bit, and all matrices are coded, not those of blocks alone. `codec` is the one by which plans reckon, `measured` the one
    whose decoding is measured (None: the same), on the matrix `sample` (rows, columns). Unless measured otherwise, a core
    decodes `decoded_per_second` weights to bfloat16 (docs/log/decoding-rates). `on_all_cores`: all cores do so at once. A
    device moves `device_bytes_per_weight` of its memory for each; none if Triton's kernels decode.
    """

    name: str
    kind: str
    words: str
    files: str
    bits: float
    row_bits: int = 0
    zeros: "OtherZeros | None" = None
    needs_data: bool = False
    lossless: bool = False
    experts_alone: bool = False
    stock_loads: bool = False
    on_all_cores: bool = False
    target: "Callable[[int], Target] | None" = None
    direct: "Callable[[], DirectTarget] | None" = None
    codec: "Callable[[], Codec]"
    measured: "Callable[[], Codec] | None" = None
    sample: "Callable[[int, int], Tensor] | None" = None
    decoded_per_second: float
    device_bytes_per_weight: float

    @property
    def is_written(self) -> bool:
        """Whether models are compressed to it."""
        return self.target is not None or self.direct is not None

    def matrix_bytes(self, rows: int, columns: int, *, otherwise: bool = False) -> float:
        """Return the bytes of a matrix, with the share of zeros that is assumed, or `otherwise`."""
        bits = self.zeros.bits if otherwise and self.zeros else self.bits
        return rows * columns * (bits + self.row_bits / columns) / 8


def written_codes() -> tuple[Code, ...]:
    """Return the codes that models are compressed to."""
    return tuple(code for code in CODES.values() if code.is_written)


def code_to_write(option: str, name: str) -> Code:
    """Return the code of that name, which `option` asks for.

    Raises:
        ConfigError: there is none, or it is only read.
    """
    code = CODES.get(name)
    if code is not None and code.is_written:
        return code
    names = " or ".join(each.name for each in written_codes())
    found = f"{name}, which is only read" if code is not None else repr(name)
    raise ConfigError(f"{option}: expected {names}, found {found}")


def code_of_kind(kind: str) -> Code:
    """Return the code of a kind; one that is not in the table, such as a program's own, is taken to be like FP8."""
    return next((code for code in CODES.values() if code.kind == kind), CODES["fp8"])


def _late(module: str, name: str, *given: Any) -> Callable[..., Any]:
    """Return what makes `name` of a module of this package, which is imported then."""
    return lambda *more: getattr(import_module(f"headrace.codec.{module}"), name)(*given, *more)


def _words() -> "Codec":
    from headrace.codec.dictionary import Dictionary
    from headrace.codec.ternary import WordsCodec

    return WordsCodec(Dictionary.build())


def _mostly_zeros(rows: int, columns: int) -> "Tensor":
    import torch

    from headrace.codec.dictionary import QMOE_ZEROS

    share = torch.rand(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    zeros = QMOE_ZEROS / 1000
    return torch.where(share < zeros, 0.0, torch.where(share < (1 + zeros) / 2, -1.0, 1.0))


def _half_zeros(rows: int, columns: int) -> "Tensor":
    import torch

    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    return torch.where(values.abs() < values.abs().median(), 0.0, values)


_ROWS = (
    Code(
        name="int4",
        kind="pack",
        words="four bits, and a scale for each group of columns",
        files="compressed-tensors pack-quantized in 4 bits",
        bits=4 + 16 / 128,
        needs_data=True,
        stock_loads=True,
        on_all_cores=True,
        target=_late("targets", "Int4Target"),
        codec=_late("published", "PackQuantized", 128),
        decoded_per_second=3.0e9,
        device_bytes_per_weight=0.0,
    ),
    Code(
        name="ternary",
        kind="ternary",
        words="three values a row, in words of 16 bits from a dictionary (QMoE)",
        files="Headrace's ternary",
        bits=0.736,  # in words of the dictionary for that share of zeros (tests/codec); offsets and levels of a row besides
        row_bits=64,
        zeros=OtherZeros(assumed="88.5%", otherwise="80%", bits=1.010),
        needs_data=True,
        experts_alone=True,
        target=lambda group: _late("targets", "TernaryTarget")(),
        codec=_late("ternary", "TritsCodec"),
        measured=_words,
        sample=_mostly_zeros,
        decoded_per_second=3.0e9,
        device_bytes_per_weight=0.0,
    ),
    Code(
        name="trits",
        kind="trits",
        words="three values a row, five weights in a byte: where `ternary` finds words no smaller",
        files="Headrace's ternary",
        bits=1.6,
        row_bits=32,
        needs_data=True,
        codec=_late("ternary", "TritsCodec"),
        sample=_mostly_zeros,
        decoded_per_second=1.2e9,
        device_bytes_per_weight=48.0,
    ),
    Code(
        name="sparse50",
        kind="sparse",
        words="half of the weights zero, by SparseGPT: a bit for each, and bfloat16 for the others (Endor)",
        files="Headrace's sparse",
        bits=1 + 16 / 2,
        row_bits=32,
        needs_data=True,
        on_all_cores=True,
        target=lambda group: _late("targets", "SparseTarget")(),
        codec=_late("sparse", "Sparse"),
        sample=_half_zeros,
        decoded_per_second=1e9,
        device_bytes_per_weight=40.0,
    ),
    Code(
        name="bf16x12",
        kind="bf16x12",
        words="bfloat16 as it is: a byte of sign and mantissa, and four bits of exponent from the row's base",
        files="Headrace's bf16x12",
        bits=12 + 32 / 4096,  # an escape for one weight in 4096, as of weights with a normal distribution
        row_bits=8 + 32,
        lossless=True,
        on_all_cores=True,
        direct=_late("targets", "Bf16x12Target"),
        codec=_late("bf16x12", "Bf16x12"),
        decoded_per_second=4.5e9,
        device_bytes_per_weight=0.0,
    ),
    Code(
        name="fp8",
        kind="fp8",
        words="floats of 8 bits, and a scale for each block",
        files="FP8 with scales of blocks, rows or the whole",
        bits=8 + 32 / 128**2,
        on_all_cores=True,
        codec=_late("published", "Fp8Blocks"),
        decoded_per_second=1.6e9,
        device_bytes_per_weight=48.0,
    ),
    Code(
        name="mxfp4",
        kind="mxfp4",
        words="floats of 4 bits, and an exponent for 32 of them",
        files="MXFP4",
        bits=4 + 8 / 32,
        on_all_cores=True,
        codec=_late("published", "Mxfp4", 64),
        decoded_per_second=3.5e8,
        device_bytes_per_weight=96.0,
    ),
    Code(
        name="gguf",
        kind="gguf",
        words="blocks of llama.cpp's files: Q8_0, Q4_0 to Q5_1, Q2_K to Q6_K, IQ4_NL",
        files="GGUF",
        bits=8.5,
        on_all_cores=True,
        codec=_late("published", "GgufBlocks", "Q8_0"),
        decoded_per_second=1.6e9,
        device_bytes_per_weight=32.0,
    ),
    Code(
        name="nf4",
        kind="nf4",
        words="sixteen levels of a normal distribution, and a scale for 64 weights",
        files="bitsandbytes NF4",
        bits=4 + 8 / 64 + 32 / (64 * 256),  # scales have a scale of their own
        on_all_cores=True,
        codec=_late("published", "Nf4"),
        decoded_per_second=1.0e9,
        device_bytes_per_weight=144.0,
    ),
    Code(
        name="awq",
        kind="awq",
        words="four bits by columns, as AutoAWQ lays them, with zero points",
        files="AWQ (gemm)",
        bits=4 + 20 / 128,
        codec=_late("published", "IntGroups", "awq", 128),
        decoded_per_second=1e8,
        device_bytes_per_weight=64.0,
    ),
    Code(
        name="gptq",
        kind="gptq",
        words="four or eight bits by columns, as AutoGPTQ lays them, with zero points and perhaps an order of columns",
        files="GPTQ",
        bits=4 + 20 / 128,
        codec=_late("published", "IntGroups", "gptq", 128),
        decoded_per_second=1e8,
        device_bytes_per_weight=64.0,
    ),
    Code(
        name="int8-groups",
        kind="packed",
        words="eight bits, or four with an order of columns, and a scale for each group",
        files="pack-quantized in 8 bits or with `actorder: group`",
        bits=8 + 16 / 128,
        codec=_late("published", "IntGroups", "packed", 128, "bfloat16", 8),
        decoded_per_second=1e8,
        device_bytes_per_weight=64.0,
    ),
    Code(
        name="nvfp4",
        kind="nvfp4",
        words="floats of 4 bits, an FP8 scale for 16 of them, and one for the whole",
        files="NVFP4 (compressed-tensors, ModelOpt)",
        bits=4 + 8 / 16,
        codec=_late("published", "Fp4Blocks"),
        decoded_per_second=8e7,
        device_bytes_per_weight=96.0,
    ),
    Code(
        name="fp4",
        kind="fp4",
        words="floats of 4 bits by rows, and a power of two for 32 of them",
        files="FP4 experts of FP8 models",
        bits=4 + 8 / 32,
        codec=_late("published", "Fp4Blocks", 32, "float8_e8m0fnu", ""),
        decoded_per_second=8e7,
        device_bytes_per_weight=96.0,
    ),
    Code(
        name="llm-int8",
        kind="llmint8",
        words="eight bits, and a scale for each row",
        files="bitsandbytes int8",
        bits=8,
        row_bits=32,
        codec=_late("published", "Int8Rows"),
        decoded_per_second=3e8,
        device_bytes_per_weight=32.0,
    ),
)
CODES: dict[str, Code] = {code.name: code for code in _ROWS}
