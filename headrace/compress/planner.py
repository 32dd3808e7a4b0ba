"""`headrace plan MODEL --compress`: what a compressed model will take, and how long making it, before a byte of it is read.

Every term is a count (bytes, operations, launches) over a rate of the machine's profile, and stands by itself in the answer.
Their sum is the time of a machine that does one thing at a time; beside it stands the simulated time of the lanes. The size of
ternary weights follows from the share of zeros, which is not known before. The plan assumes that of QMoE's largest model. It
also shows the size with four zeros in five (modern mixtures have 0.76 to 0.84). The table of codes (`codec/table.py`) has these
figures.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from headrace.ask.model_config import read_parts, refuse_other_dtypes
from headrace.ask.place import RunPlace
from headrace.codec.table import Code, code_to_write
from headrace.codec.units import coded_shapes
from headrace.compress.forecast import EXPERTS_AT_ONCE, Block, CodingWork, Matrices, side_by_side, terms
from headrace.compress.recoding import MOST_BYTES_IN_MEMORY
from headrace.compress.room import Room, groups_of_sums, room_in
from headrace.model import Chain
from headrace.model.parts.banks import find_experts
from headrace.model.seats.bank_check import why_no_banks
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.value.decoding import why_no_gain
from headrace.terms.coding import as_matrix
from headrace.terms.layout import ParameterSpec
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import Budget
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.options import DEFAULT_SEQUENCE_LENGTH
from headrace.terms.sizes import format_bytes, format_seconds
from headrace.terms.tables import Report

_RECODED_PER_SECOND = 3e8  # weights per second and core that become bf16x12 (docs/log/lossless)
_BYTES = 2
_UNSAID = Budget()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionReport(Report):
    """What compressing takes: parameters, bytes by part of the result, seconds by term and of all side by side, and bytes that
    must fit.

    `warning` says that it takes more memory than is allowed, "" where it does not; None: nobody said how much is.
    """

    model: str
    code: str
    machine: str
    parameters: int
    coded_parameters: int
    tokens: int
    row_tokens: int
    result_bytes: dict[str, int]
    modern_bytes: int | None
    seconds: dict[str, float]
    forecast_seconds: float
    memory_bytes: dict[str, int]
    warning: str | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes of the result."""
        return sum(self.result_bytes.values())

    @property
    def bits_per_parameter(self) -> float:
        """Bits of the result for each parameter of the model."""
        return 8 * self.total_bytes / self.parameters

    @property
    def total_seconds(self) -> float:
        """Seconds of all terms, one after the other."""
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        sums = {name: getattr(self, name) for name in ("total_bytes", "bits_per_parameter", "total_seconds")}
        found = {name: getattr(self, name) for name in self.__slots__} | sums
        return found if self.warning is not None else {name: value for name, value in found.items() if name != "warning"}

    def lines(self) -> Iterator[str]:
        """Yield the lines that people read."""
        yield f"model     {self.model}, {self.parameters / 1e9:.4g} billion parameters, {self.coded_parameters / 1e9:.4g} coded"
        yield f"machine   {self.machine}"
        if self.tokens:
            yield f"data      {self.tokens} calibration tokens, in rows of {self.row_tokens}"
        yield ""
        for title, values in (("result", self.result_bytes), ("memory", self.memory_bytes)):
            for label, value in values.items():
                yield f"{title:<10}{label:<34}{format_bytes(value):>12}"
        ratio = _BYTES * self.parameters / self.total_bytes
        yield f"{'':<10}{'result in all':<34}{format_bytes(self.total_bytes):>12}"
        yield f"{'':<10}{self.bits_per_parameter:.3f} bits a parameter, {ratio:.1f} times smaller than 16 bits"
        zeros = code_to_write("compress", self.code).zeros
        if self.modern_bytes is not None and zeros is not None:
            size = format_bytes(self.modern_bytes)
            yield f"{'':<10}where {zeros.otherwise} of the weights become zero, and not {zeros.assumed}: {size}"
        yield ""
        for label, seconds in self.seconds.items():
            yield f"{'time':<10}{label:<34}{format_seconds(seconds):>12}"
        if self.warning:
            yield f"{'note':<10}{self.warning}"
        yield f"{'':<10}{'one after the other':<34}{format_seconds(self.total_seconds):>12}"
        yield f"{'':<10}{'side by side, as it runs':<34}{format_seconds(self.forecast_seconds):>12}"


def plan_compression(
    model: str | Path,
    name: str,
    machine: str | Ceilings | None,
    *,
    tokens: int | None = None,
    row_tokens: int | None = None,
    here: bool = False,
    budget: Budget = _UNSAID,
) -> CompressionReport:
    """Return what compressing `model` to the code `name` takes on a machine (None: a nominal one of this size). `model` is a
    directory, a config.json, or a name on the Hub.

    Calibration takes `tokens`: by default the 128 rows that `compress` takes, each of `row_tokens` (None: 2048, or the model's
    limit). It takes more where a matrix would see fewer tokens than it has inputs. Of the `budget` host memory counts: with
    little, experts come one at a time, and rows pass a block several times. `here` says that it is this machine.

    Raises:
        ConfigError: there is no such code or machine, or the machine has less host memory than the budget.
        ModelError: there is no configuration, or its architecture cannot be run block by block.
    """
    code = code_to_write("compress", name)
    measured = load_profile(machine) if isinstance(machine, str) else machine
    ceilings = measured
    if ceilings is None:
        usual = RunPlace.of(None, here=True)
        ceilings = nominal_machine(usual.cores, host_bytes=usual.host_bytes, device_bytes=None)
    config, _ = read_parts(model)
    refuse_other_dtypes(code, config)
    chain = Chain.from_config(config, "bfloat16", Optimizer())
    if code.lossless:
        return _without_loss(code, chain, ceilings, budget)
    place = RunPlace.of(measured, here=here or machine is None) if budget.host_bytes is not None else None
    return _calibrated(code, chain, ceilings, place, budget, tokens, row_tokens)


def _calibrated(
    code: Code,
    chain: Chain,
    ceilings: Ceilings,
    place: RunPlace | None,
    budget: Budget,
    tokens: int | None,
    row_tokens: int | None,
) -> CompressionReport:
    """Return what rounding by what calibration rows see takes; in a `place`, within the `budget` there."""
    config = chain.config
    blocks = [_matrices(layout.parameters, config, code) for layout in chain.layouts[1 : chain.num_blocks + 1]]
    coded = [matrix for block in blocks for matrix in block]
    num_coded = sum(matrix.weights for matrix in coded)
    rest = chain.num_parameters - num_coded
    text = config.get_text_config()
    row_tokens = row_tokens or _row_tokens(text)
    tokens = tokens or _calibrating(coded, row_tokens)
    size, other = (
        round(sum(code.matrix_bytes(each.count * each.outputs, each.inputs, otherwise=otherwise) for each in coded))
        for otherwise in (False, True)
    )
    sizes = [layout.num_elements for layout in chain.layouts[1 : chain.num_blocks + 1]]
    result = {f"{code.name} matrices": size, "what stays in 16 bits": _BYTES * rest}
    memory = {
        "the largest block in 16 bits": _BYTES * max(sizes),
        "sums of inputs of 16 experts": max(4 * min(EXPERTS_AT_ONCE, each.count) * each.inputs**2 for each in coded),
    }
    room, passes = None, [1] * len(blocks)
    if place is not None:
        room = _room(chain, code, place, budget)
        memory, passes = _memory(room, blocks)
    job = CodingWork(
        blocks=[
            Block(parameters, matrices, _file_bytes(code, parameters, matrices), count)
            for parameters, matrices, count in zip(sizes, blocks, passes, strict=True)
        ],
        tokens=tokens,
        hidden_bytes=_BYTES * text.hidden_size,
        row_tokens=row_tokens,
        vocabulary=text.vocab_size,
        other_parameters=chain.num_parameters - sum(sizes),
        ahead=room is None or room.ahead,
    )
    return CompressionReport(
        model=type(chain.model).__name__,
        code=code.name,
        machine=ceilings.called,
        parameters=chain.num_parameters,
        coded_parameters=num_coded,
        tokens=tokens,
        row_tokens=row_tokens,
        result_bytes=result,
        modern_bytes=other + _BYTES * rest if code.zeros else None,
        seconds=terms(job, ceilings),
        forecast_seconds=side_by_side(job, ceilings),
        memory_bytes=memory | {"hidden states, in tiers": job.hidden_bytes * tokens},
        warning=None if room is None else room.warning,
    )


def _row_tokens(text: Any) -> int:
    """Return the tokens of a row where nobody says them."""
    limit = getattr(text, "max_position_embeddings", None) or DEFAULT_SEQUENCE_LENGTH
    return min(DEFAULT_SEQUENCE_LENGTH, limit)


def _calibrating(coded: Sequence[Matrices], row_tokens: int) -> int:
    """Return the tokens that calibrate where nobody says them."""
    least = math.ceil(max(matrix.inputs / matrix.share for matrix in coded))
    return max(least, CompressOptions.calibration_rows * row_tokens)


def _without_loss(code: Code, chain: Chain, ceilings: Ceilings, budget: Budget) -> CompressionReport:
    """Return what writing all matrices in a lossless code takes: they are read, coded and written, one file at a time."""
    units = [[as_matrix(spec.shape) for spec in coded_shapes(layout.parameters, code)] for layout in chain.layouts]
    coded = sum(rows * columns for unit in units for rows, columns in unit)
    codes = [sum(code.matrix_bytes(*shape) for shape in unit) for unit in units]
    rest = _BYTES * (chain.num_parameters - coded)
    first, *blocks = codes[: chain.num_blocks + 1]
    largest = max((_BYTES * rows * columns for unit in units for rows, columns in unit), default=0)
    memory = {
        "the codes of one file": min(MOST_BYTES_IN_MEMORY, round(max([first + sum(codes[chain.num_blocks + 1 :]), *blocks]))),
        "its largest matrix, and the codes": round(largest * (1 + code.bits / 16)),
    }
    read = sum(drive.read_bytes_per_second for drive in ceilings.drives)
    write = sum(drive.write_bytes_per_second for drive in ceilings.drives)
    needed, allowed = sum(memory.values()), budget.host_bytes
    short = allowed is not None and needed > allowed
    warning = f"host memory: it takes {format_bytes(needed)}, allowed are {format_bytes(allowed or 0)}" if short else ""
    why = why_no_gain(code.kind, ceilings)
    slow = f"a generation that reads from these drives would not be faster: {why}" if why else ""
    seconds = {
        "weights read": _BYTES * chain.num_parameters / read,
        "encoding on the host's cores": coded / (_RECODED_PER_SECOND * ceilings.cores),
        "result written": (sum(codes) + rest) / write,
    }
    return CompressionReport(
        model=type(chain.model).__name__,
        code=code.name,
        machine=ceilings.called,
        parameters=chain.num_parameters,
        coded_parameters=coded,
        tokens=0,
        row_tokens=0,
        result_bytes={f"{code.name} matrices": round(sum(codes)), "what stays in 16 bits": rest},
        modern_bytes=None,
        seconds=seconds,
        forecast_seconds=sum(seconds.values()),
        memory_bytes=memory,
        warning="; ".join(each for each in (warning, slow) if each) or (None if allowed is None else ""),
    )


def _file_bytes(code: Code, parameters: int, matrices: Sequence[Matrices]) -> int:
    """Return the bytes of a block's file: codes, and the rest in 16 bits."""
    coded = sum(each.weights for each in matrices)
    codes = sum(code.matrix_bytes(each.count * each.outputs, each.inputs, otherwise=False) for each in matrices)
    return round(codes) + _BYTES * (parameters - coded)


def _memory(room: Room, blocks: Sequence[Sequence[Matrices]]) -> tuple[dict[str, int], list[int]]:
    """Return what memory in `room` is for, and how often rows pass each block to be coded."""
    sums = [[4 * each.inputs**2 for each in block for _ in range(each.count)] for block in blocks]
    groups = [groups_of_sums(each, room.sums_bytes) for each in sums]
    largest = max(
        sum(each[start : start + count])
        for each, found in zip(sums, groups, strict=True)
        for start, count in zip(accumulate(found, initial=0), found, strict=False)
    )
    memory = {
        "what lies around the blocks": room.ends_bytes,
        "a block, but one expert, twice" if room.by_experts else "the largest block, twice": 2 * room.block_bytes,
        **({"the next block": room.block_bytes} if room.ahead else {}),
        "the codes of a block": room.codes_bytes,
        "sums of inputs, at once": largest,
    }
    return memory, [len(each) for each in groups]


def _room(chain: Chain, code: Code, place: RunPlace, budget: Budget) -> Room:
    """Return what memory is for in the host's part of `budget`."""
    allowed = place.allowance(budget, ssd_bytes=None, import_workspace_bytes=None).host_bytes
    experts = find_experts(chain.model, chain.runner.blocks)
    singly = any(experts) and not why_no_banks(chain.config)
    return room_in(chain, experts, allowed, _BYTES, come_singly=singly, code=code)


def _matrices(parameters: Any, config: Any, code: Code) -> list[Matrices]:
    """Return the matrices of a block that are coded."""
    text = config.get_text_config()
    chosen = float(getattr(text, "num_experts_per_tok", 0) or getattr(text, "top_k", 0) or 1)
    target = code.target(CompressOptions.group_size) if code.target is not None else None
    specs = sorted(coded_shapes(parameters, code), key=lambda spec: len(spec.shape), reverse=True)
    sharing, found = _sharing(specs, text.hidden_size), list[Matrices]()
    for spec in specs:
        *stack, rows, columns = spec.shape
        count = math.prod(stack)
        grid = target.grid(columns, torch.bfloat16) if target is not None else None
        share = min(1.0, chosen / count) if stack else 1.0
        tries = grid.tries if grid is not None else 0
        found.append(Matrices(count, rows, columns, share, tries=tries, summed=spec.name not in sharing))
    return found


def _sharing(specs: Sequence[ParameterSpec], hidden_size: int) -> frozenset[str]:
    """Return the matrices whose inputs another one has, too: of those of a module that are as wide as hidden states all but the
    first, such as keys and values. Where the last makes hidden states again, it has inputs of its own.
    """
    modules: dict[str, list[ParameterSpec]] = {}
    for spec in specs:
        if spec.shape[-1] == hidden_size:
            modules.setdefault(".".join(spec.name.split(".")[:-2]), []).append(spec)
    ends = [each[-1].name for each in modules.values() if each[-1].shape[-2] == hidden_size]
    return frozenset(spec.name for each in modules.values() for spec in each[1:] if spec.name not in ends)
