"""Compressing a model: options and data go in, a model directory comes out, and the same command resumes a killed run.

Unfinished work lies in `OUT.unfinished`. A record names the finished blocks; the same command continues after the last one.
Invariant: OUT appears complete or not at all, and a killed run ends with the bytes of an undisturbed one.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.codec.table import CODES, code_to_write
from headrace.codec.targets import Target
from headrace.compress.calibration import CalibrationData, open_calibration
from headrace.compress.coded_files import CodedFiles, quantisation_config
from headrace.compress.quantiser import Quantiser
from headrace.compress.rounding import BlockCode, ParameterReport
from headrace.compress.work import MODEL, appear, ends_of, identity_of, left_lines, listed, unfinished, working
from headrace.machine.host_memory import keep_freed_memory
from headrace.machine.limits import usual_host_bytes
from headrace.model import Chain
from headrace.model.trials.stock_loading import replaced_for_codes
from headrace.model.written.export import export_bytes
from headrace.store.work import Work, day_begun
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.provenance import COMPRESSION_NOTE_NAME
from headrace.terms.sizes import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A finished compression. Losses are means over the `tokens` of held-out rows, in nats; bytes are of all weights."""

    output: Path
    reports: tuple[ParameterReport, ...]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int
    loss_before: float
    loss_after: float
    tokens: int


def compress_model(options: CompressOptions, *, say: Callable[[str], None] = lambda text: None) -> Compressed:
    """Compress `options.model` into `options.output`, or resume. `say` gets lines for people.

    Raises:
        InputError: model, data or an option cannot be used, or held-out loss rises by more than `most_loss`; nothing is left.
        StorageError: a disk is full, or fails; the same command goes on once the cause is removed.
    """
    target_of(options)  # refused before anything is read
    output, checkpoint, chain = ends_of(options)
    work = unfinished(output)
    options = replace(options, template_date=options.template_date or day_begun(work))
    data = open_calibration(options, chain, say)
    options = replace(options, sequence_length=data.sequence_length, template_date=data.template_date)
    _refuse_replaced(options, chain)
    identity = identity_of(options, checkpoint) | {"data": data.digest}
    # Space for the result as if nothing became smaller, and for the hidden states.
    tokens = sum(each.counts.numel() * (2 if each.held_out else 1) for each in data.rows)
    needed = export_bytes(checkpoint) + 2 * tokens * chain.hidden_size * 4
    with working(work, needed):
        return _Compression(options, Work.open(work, identity), data, say).finish(output)


def _refuse_replaced(options: CompressOptions, chain: Chain) -> None:
    """Refuse a model whose files stock transformers could not load."""
    replaced = replaced_for_codes(chain.model) if CODES[options.to].stock_loads else None
    if replaced:
        raise ModelError(
            f"{options.model}: its experts ({replaced}) lie in one stack that int4 does not code, and transformers loads "
            "coded models of this kind only in another form. Give another model"
        )


def target_of(options: CompressOptions) -> Target:
    """Return what writes the code that `options` ask for.

    Raises:
        ConfigError: there is no such code, or it is only read.
    """
    target = code_to_write("to", options.to).target
    if target is None:
        raise ConfigError(f"to: {options.to} needs no data: `headrace.compress.recoding.recode` writes it")
    if not options.data:
        raise ConfigError(f"data: {options.to} rounds weights for the inputs of real data; give --data FILE")
    return target(options.group_size)


class _Compression:
    """One process's part of a compression: it opens what exists, and does the rest."""

    def __init__(
        self,
        options: CompressOptions,
        work: Work,
        data: CalibrationData,
        say: Callable[[str], None],
    ) -> None:
        self.options, self.work, self.say = options, work, say
        self.done = list(work.done())  # what lies outside of blocks, then block by block
        host_bytes = work.record.setdefault("host_bytes", options.host_memory or usual_host_bytes(pins=False))
        self.target = target_of(options)
        self.quantiser = Quantiser(
            options.model,
            self.target,
            data.rows,
            work.folder,
            compute_dtype=options.compute_dtype,
            host_bytes=host_bytes,
            experts_only=options.experts_only,
        )
        if self.quantiser.room.tight:
            keep_freed_memory(False)
        if self.quantiser.room.warning:
            say(self.quantiser.room.warning)
        of_transformers = CODES[options.to].stock_loads
        self.decodes_at_load = of_transformers and self.quantiser.decodes_at_load
        self.files = CodedFiles(work.folder / MODEL, self.quantiser.weights, self.quantiser.chain, joined=of_transformers)

    def finish(self, output: Path) -> Compressed:
        """Do the remaining blocks, and everything after them."""
        try:
            self._blocks()
            result = self._result(output)
            self._refuse_loss(result)
            self._directory(result)
        finally:
            self.quantiser.close()
        appear(self.work.folder, output)
        return result

    def _blocks(self) -> None:
        total, before = self.quantiser.num_blocks, len(self.blocks)
        if before:
            self.say(f"going on after block {before} of {total}")
        self.quantiser.prepare(blocks_done=before)
        if not self.done:
            self.work.begin()
            self._note({"digest": self.files.write(0, {})})
        began = start = time.perf_counter()
        codes: dict[int, tuple[dict[str, Any], BlockCode]] = {}

        def keep(block: int, code: BlockCode, left: Mapping[str, str]) -> None:
            digest = self.files.write(block + 1, code.parts)
            reports = [asdict(report) for report in code.reports]
            codes[block] = {"digest": digest, "reports": reports, "groups": code.groups, "left": dict(left)}, code

        def commit(block: int) -> None:
            nonlocal start
            entry, code = codes.pop(block)
            self._note(entry)
            now = time.perf_counter()
            rest = (now - began) / (block + 1 - before) * (total - block - 1)
            self.say(_block_line(block, total, code.reports, now - start, rest))
            start = now

        self.quantiser.run(keep, commit, blocks_done=before)

    def _note(self, item: dict[str, Any]) -> None:
        self.work.add(item)
        self.done.append(item)

    @property
    def blocks(self) -> Sequence[dict[str, Any]]:
        """What was noted of finished blocks."""
        return self.done[1:]

    def _result(self, output: Path) -> Compressed:
        before, after, tokens = self.quantiser.losses()
        self._check_coded()
        sizes = [(self.files.folder / self.files.name(unit)).stat().st_size for unit in range(self.quantiser.num_blocks + 1)]
        return Compressed(
            output=output,
            reports=tuple(_report_of(each) for block in self.blocks for each in block["reports"]),
            left={name: reason for block in self.blocks for name, reason in block["left"].items()},
            bytes_before=self.quantiser.checkpoint.num_bytes,
            bytes_after=sum(sizes),
            loss_before=before,
            loss_after=after,
            tokens=tokens,
        )

    def _check_coded(self) -> None:
        if not any(block["reports"] for block in self.blocks):
            reasons = {reason for block in self.blocks for reason in block["left"].values()}
            raise ModelError(
                f"{self.options.model}: none of its matrices can be coded as {self.options.to} ({'; '.join(sorted(reasons))}); "
                "nothing was written"
            )

    def _refuse_loss(self, result: Compressed) -> None:
        most = self.options.most_loss
        rise = result.loss_after - result.loss_before
        if most is not None and not rise <= most:
            raise ConfigError(
                f"most_loss: held-out loss rose by {rise:.4f} from {result.loss_before:.4f} (over {result.tokens} tokens), "
                f"allowed is {most:g}; nothing was written: give more calibration data, --experts-only, or another code"
            )

    def _directory(self, result: Compressed) -> None:
        groups = {name: size for block in self.blocks for name, size in block["groups"].items()}
        digests = {self.files.name(unit): item["digest"] for unit, item in enumerate(self.done)}
        note = {
            "code": self.options.to,
            "digests": digests,
            "loss_before": result.loss_before,
            "loss_after": result.loss_after,
            "held_out_tokens": result.tokens,
            "bytes_before": result.bytes_before,
            "bytes_after": result.bytes_after,
            "matrices": [asdict(report) for report in result.reports],
            "left": dict(result.left),
            "unused_tensors": list(self.quantiser.chain.unused_tensors),
        }
        config = quantisation_config(self.quantiser.weights, self.target, groups, decodes_at_load=self.decodes_at_load)
        self.files.finish({"quantization_config": config}, {COMPRESSION_NOTE_NAME: json.dumps(note, indent=1) + "\n"})


def _report_of(values: Mapping[str, Any]) -> ParameterReport:
    read: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return ParameterReport(**read)


def _block_line(block: int, total: int, reports: Sequence[ParameterReport], seconds: float, rest_seconds: float) -> str:
    """Return the line about a block: for each parameter the error of its products, and that of plain rounding."""
    words = [f"{_short(report.name)} {report.error:.2g} ({report.rounding_error:.2g})" for report in reports]
    plain = sum(len(report.plain) + len(report.failed) for report in reports)
    words += [f"{plain} rounded plainly"] if plain else []
    left = f", {format_seconds(rest_seconds)} left" if block + 1 < total else ""
    return f"block {block + 1} of {total}, {format_seconds(seconds)}{left}: {', '.join(words) or 'nothing to code'}"


def _short(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def result_table(result: Compressed) -> str:
    """Return the table at the end: sizes, ratio, losses, errors by kind of matrix, and what was left or rounded plainly."""
    rise = result.loss_after - result.loss_before
    lines = [
        f"wrote {result.output}",
        f"  size           {format_bytes(result.bytes_before)} -> {format_bytes(result.bytes_after)}  "
        f"({result.bytes_before / result.bytes_after:.2f}x)",
        f"  held-out loss  {result.loss_before:.4f} -> {result.loss_after:.4f}  ({rise:+.4f}, {result.tokens} tokens)",
    ]
    kinds: dict[str, list[ParameterReport]] = {}
    for report in result.reports:
        kinds.setdefault(_short(report.name), []).append(report)
    width = max(map(len, kinds), default=0)
    for kind, reports in kinds.items():
        error, rounding, zeros = (
            sum(getattr(report, name) for report in reports) / len(reports) for name in ("error", "rounding_error", "zeros")
        )
        lines.append(f"  {kind:{width}}  error {error:.4f}, rounding {rounding:.4f}, zeros {zeros:.2f}  ({len(reports)} times)")
    for report in result.reports:
        if report.plain:
            lines.append(f"  {report.name}: experts without tokens, rounded plainly: {listed(report.plain)}")
        if report.failed:
            lines.append(f"  {report.name}: without a factor, rounded plainly: {listed(report.failed)}")
        if report.unsorted:
            lines.append(f"  {report.name}: padding, template and special tokens could not be told apart, and count")
    return "\n".join([*lines, *left_lines(result.left)])
