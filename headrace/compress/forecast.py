"""How long rounding a model takes: by term, each a count over a rate, and as the lanes do it side by side.

The second is the simulated time of the very programs that `schedule.py` makes; the terms say what they are made of.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.compress.schedule import BlockFigures, MatrixGroup, ProgramFigures, build_block
from headrace.model.chain.caught import sum_operations
from headrace.plan.clock.rates import Rates
from headrace.plan.clock.simulate import seconds_of
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Program

# Operations of a Cholesky factor, the inverse, and the inverse's factor, relative to the cube of the inputs.
_CHOLESKY = 4 / 3
# GPTQ's own operations reach this share of the float32 rate of large products (an assumption; QMoE's batches of 16 experts).
_GPTQ_SHARE = 0.2
# Processors that multiply bfloat16 themselves sum inputs at this share of that rate (docs/log/rounding-loops).
_SUMS_SHARE = 0.5
EXPERTS_AT_ONCE, _KERNELS_OF_A_COLUMN, _KERNEL_SECONDS = 16, 6, 1e-5
# On a device, trying a scale for a weight moves so many bytes (a division, a rounding, six operations more); so does making up
# for an error. A core tries so many scales of a weight, and rounds so many weights, in a second (docs/log/rounding-loops).
_TRY_BYTES, _CORRECTION_BYTES = 64, 16
_TRIED_PER_SECOND, _ROUNDED_PER_SECOND = 1e9, 3e7
# Columns that GPTQ corrects at once: half of them, on average, follow a column.
_BLOCK_COLUMNS = 128
# Of `hidden_seconds`, which are of a forward, a recompute and a backward pass, a forward pass takes this share.
_FORWARD_SHARE = 1 / 3
# So many weights per second and core become words (docs/log/ternary).
_ENCODED_PER_SECOND = 1e8
_BYTES = 2
# Tokens that pass a block together, and calibrating ones for each held-out token: the command's own defaults.
_LOT_TOKENS, _CALIBRATING_OF_HELD_OUT = 4096, 4
_MOST_LOTS, _MOST_GROUPS, _SIMULATED = 8, 4, 6


@dataclass(frozen=True, slots=True)
class Matrices:
    """`count` matrices of (outputs, inputs), each used by a `share` of all tokens.

    `tries`: scales that are tried for a group of weights. `summed`: whether their inputs are not those of other matrices, whose
    sums they share.
    """

    count: int
    outputs: int
    inputs: int
    share: float
    tries: int = 0
    summed: bool = True

    @property
    def weights(self) -> int:
        """Numbers in all of them."""
        return self.count * self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class Block:
    """A block: all its `parameters`, its coded `matrices`, bytes of its file, and how often rows pass it to be coded."""

    parameters: int
    matrices: Sequence[Matrices]
    file_bytes: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingWork:
    """What is rounded: `blocks`, for `tokens` of `hidden_bytes` each, in rows of `row_tokens`. Around the blocks lie
    `other_parameters`. The loss of held-out tokens takes logits of a `vocabulary`.

    `ahead`: the next block is read while one is rounded.
    """

    blocks: Sequence[Block]
    tokens: int
    hidden_bytes: int
    other_parameters: int
    row_tokens: int = 0
    vocabulary: int = 0
    ahead: bool = True

    @property
    def lots(self) -> int:
        """How often calibrating rows are taken up in one pass of a block."""
        return math.ceil(self.tokens / max(_LOT_TOKENS, self.row_tokens))

    @property
    def passes_of_held_out(self) -> float:
        """Passes of held-out rows through a block, with weights as they came and as coded, in passes of the others."""
        return 2 / _CALIBRATING_OF_HELD_OUT


@dataclass(frozen=True, slots=True)
class _Terms:
    """Seconds of a block, each as if nothing else ran. Those of hidden states, `passed` and `caught` are of one pass of all
    rows: through the block, or for their inputs.
    """

    read: float
    passed: float
    caught: float
    hidden_read: float
    hidden_written: float
    sums: float
    rounded: dict[str, float]
    encoded: float
    written: float


def terms(job: CodingWork, ceilings: Ceilings) -> dict[str, float]:
    """Return the seconds of each term, as if nothing else ran."""
    found: dict[str, float] = {}
    read, write = _drives(ceilings)
    link = ceilings.host_to_device_bytes_per_second if ceilings.has_device else math.inf
    for block in job.blocks:
        each, passes = _terms_of(block, job, ceilings), block.passes
        sent = {"weights to the device": _BYTES * block.parameters / link}
        held = job.passes_of_held_out
        moved = (1 + passes + held) * each.hidden_read + (1 + held) * each.hidden_written
        hidden = {"hidden states read and written": moved}
        passed = {"passes, before and after": (1 + held) * each.passed + passes * each.caught, "sums of inputs": each.sums}
        kept = {"encoding on the host's cores": each.encoded, "result written": each.written}
        for label, seconds in {"weights read": each.read, **sent, **hidden, **passed, **each.rounded, **kept}.items():
            found[label] = found.get(label, 0.0) + seconds
    found["weights read"] += _BYTES * job.other_parameters / read
    found["weights to the device"] += _BYTES * job.other_parameters / link
    found["result written"] += _BYTES * job.other_parameters / write
    found["loss of held-out rows"] = _loss_seconds(job, ceilings)
    return {label: seconds for label, seconds in found.items() if seconds}


def side_by_side(job: CodingWork, ceilings: Ceilings) -> float:
    """Return the seconds of the programs, whose lanes work side by side. Rows go in a few large lots, and blocks that are alike
    are simulated until they follow one another evenly. That the last block of all has a pass less is not counted.
    """
    rates = Rates(ceilings, "bfloat16", None, None)
    lots = min(_MOST_LOTS, job.lots)
    held_out = math.ceil(lots / _CALIBRATING_OF_HELD_OUT)
    total, start = 0.0, 0
    while start < len(job.blocks):
        block = job.blocks[start]
        alike = next((at for at in range(start, len(job.blocks)) if job.blocks[at] != block), len(job.blocks)) - start
        figures = _figures(_terms_of(block, job, ceilings), block.passes, lots, rates)
        plan = ProgramFigures(
            blocks=[figures] * (min(alike, _SIMULATED) + 1),  # one follows: behind a last block rows do not pass on
            calibrating=lots,
            held_out=held_out,
            lot_tokens=1,
            lot_bytes=job.tokens * job.hidden_bytes // lots,
            ahead=job.ahead,
        )
        found = seconds_of(_programs(plan), rates)
        total += found[-1] + (found[-1] - found[-2]) * (alike - len(found)) if alike > len(found) else found[-1]
        start += alike
    read, write = _drives(ceilings)
    ends = _BYTES * job.other_parameters * (1 / read + 1 / write)
    return total + ends + _loss_seconds(job, ceilings)


def _programs(plan: ProgramFigures) -> list[Program]:
    programs, before = list[Program](), Snapshot()
    for block in range(len(plan.blocks) - 1):
        program, before = build_block(plan, block, before)
        programs.append(program)
    return programs


def _drives(ceilings: Ceilings) -> tuple[float, float]:
    read = sum(drive.read_bytes_per_second for drive in ceilings.drives)
    return read, sum(drive.write_bytes_per_second for drive in ceilings.drives)


def _terms_of(block: Block, job: CodingWork, ceilings: Ceilings) -> _Terms:
    coded, tokens = block.matrices, job.tokens
    products, single = ceilings.flops_per_second["bfloat16"], ceilings.flops_per_second["float32"]
    read, write = _drives(ceilings)
    passed = block.parameters - sum(each.weights for each in coded) + sum(each.weights * each.share for each in coded)
    hidden_size = job.hidden_bytes // _BYTES
    attended = job.row_tokens * hidden_size / ceilings.attention_share  # of a query: half of the row, keys and values
    other = ceilings.hidden_seconds * _FORWARD_SHARE * tokens * hidden_size + ceilings.launch_seconds * job.lots
    sums = sum(tokens * each.share * each.count * sum_operations(each.inputs) for each in coded if each.summed)
    rounding = sum(each.count * (_CHOLESKY * each.inputs**3 + 2.0 * each.outputs * each.inputs**2) for each in coded)
    columns = sum(math.ceil(each.count / EXPERTS_AT_ONCE) * each.inputs for each in coded)
    weights = sum(each.weights for each in coded)
    # A pass for inputs ends before the last product, unless experts have some tokens only.
    spared = coded[-1].weights if coded and all(each.share == 1.0 for each in coded) else 0
    tried = 2.0 * sum(each.weights * (1 + each.tries) for each in coded)  # plain rounding, and GPTQ: each searches
    by_column, search = weights / (_ROUNDED_PER_SECOND * ceilings.cores), tried / (_TRIED_PER_SECOND * ceilings.cores)
    if ceilings.has_device:
        launched, corrected = columns * _KERNELS_OF_A_COLUMN * _KERNEL_SECONDS, weights * _BLOCK_COLUMNS / 2
        by_column = launched + corrected * _CORRECTION_BYTES / ceilings.make_bytes_per_second
        search = tried * _TRY_BYTES / ceilings.make_bytes_per_second
    return _Terms(
        read=_BYTES * block.parameters / read,
        passed=2.0 * tokens * (passed + attended) / products + other,
        caught=2.0 * tokens * (passed - spared + attended) / products + other,
        hidden_read=tokens * job.hidden_bytes / read,
        hidden_written=tokens * job.hidden_bytes / write,
        sums=sums / (single if ceilings.has_device else max(single, _SUMS_SHARE * products)),
        rounded={
            "GPTQ's factors and corrections": rounding / (single * _GPTQ_SHARE),
            "errors of products, for the report": sum(3.0 * each.weights * each.inputs for each in coded) / single,
            "GPTQ, column by column": by_column,
            "search of scales": search,
        },
        encoded=weights / (_ENCODED_PER_SECOND * ceilings.cores),
        written=block.file_bytes / write,
    )


def _loss_seconds(job: CodingWork, ceilings: Ceilings) -> float:
    """Return what the loss of held-out rows takes, twice."""
    logits = job.passes_of_held_out * job.tokens * job.vocabulary
    product = job.hidden_bytes / ceilings.flops_per_second["bfloat16"]  # two operations for each of the hidden numbers
    return logits * (product + ceilings.logit_seconds * _FORWARD_SHARE)


def _figures(seconds: _Terms, passes: int, lots: int, rates: Rates) -> BlockFigures:
    """Return a block's figures for programs, with at most a few groups: what takes so long at the `rates` of the lanes."""
    groups = min(passes, _MOST_GROUPS)
    again = (seconds.caught * passes / groups - seconds.passed) / lots  # beyond a whole pass, for those that a group stands for
    group = MatrixGroup(
        sum_flops=max(0.0, seconds.sums / groups / lots + again) * rates.flops_per_second,
        round_flops=sum(seconds.rounded.values()) / groups * rates.flops_per_second,
        weights=round(seconds.encoded / groups * rates.bytes_per_second[Lane.UPDATE]),
    )
    return BlockFigures(
        read_bytes=round(seconds.read * rates.bytes_per_second[Lane.SSD_READ]),
        kept_bytes=round(seconds.written * rates.bytes_per_second[Lane.SSD_WRITE]),
        token_flops=seconds.passed / lots * rates.flops_per_second,
        groups=[group] * groups,
    )
