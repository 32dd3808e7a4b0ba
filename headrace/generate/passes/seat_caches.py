"""Keys and values of a generation's seats on their way between drives, host memory and compute.

A seat that comes in takes a *place*: bytes for each block at that block's home, which the next seat with that place overwrites.
On the drives that is a scratch file without a name, whose space is free again when its process ends, however that happens.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from headrace.codec.cache_codes import CACHE_CODES
from headrace.files import DirectFile, ThreadEngine, Volume, stripe_shares
from headrace.generate.plan.cache_plan import COMPUTE, HOST, SSD, cache_drive_bytes, resident_blocks, tail_bytes, whole_bytes
from headrace.generate.plan.plan import GenerationPlan
from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.machine.protocol import Machine
from headrace.model.blocks.taps import BlockCall
from headrace.model.caches.borders import ChunkBorder, tokens_between_borders
from headrace.model.caches.stored_layer import RunBlock, StoredLayer
from headrace.model.caches.tiered_cache import tier_layers
from headrace.model.seats.attention_errors import AttentionErrors
from headrace.model.seats.host_attention import Away, attending_here, named, using
from headrace.model.seats.seats import Seat
from headrace.terms.errors import ConfigError, StepFailed
from headrace.terms.events import Sink
from headrace.terms.program import Op, Pool
from headrace.terms.sizes import MIB, PAGE_BYTES, round_up

_Flat = TypeVar("_Flat", Bytes, torch.Tensor)


class CacheBuffers:
    """The buffers of `plan.caches.cache_buffers`: arrays in host memory, tensors on a device."""

    def __init__(
        self,
        plan: GenerationPlan,
        host: dict[str, list[Bytes]],
        on_compute: Mapping[str, Sequence[torch.Tensor]],
        errors: AttentionErrors | None,
    ) -> None:
        costs, new = plan.most_costs, plan.new_tokens
        self.carried_host: list[Bytes] = host.get("cache_carried_host", [])
        self.carried, self.on_device = on_compute["cache_carried"], on_compute["cache_on_device"]
        self.on_its_way, self.errors = host.get("cache_on_its_way", []), errors
        tails = {block: tail_bytes(plan.caches, costs, new, block) for block in plan.caches.blocks(SSD)}
        kept, resident = (
            {block: round_up(whole_bytes(costs, new, block), PAGE_BYTES) for block in blocks}
            for blocks in (plan.caches.blocks(HOST), resident_blocks(plan.caches, costs))
        )
        # By place and block: bytes that wait for a full page, caches that live in host memory, coded ones where compute is.
        self.tails = [_cut(flat, tails) for flat in host.get("cache_tails", [])]
        self.kept = [_cut(flat, kept) for flat in host.get("cache_kept", [])]
        self.resident = [_cut(flat, resident) for flat in on_compute["cache_resident"]]


class CacheFile:
    """The caches on the drives: for each place and block as many pages as will be full. Use `make`, and close it."""

    def __init__(self, plan: GenerationPlan, volume: Volume, engine: ThreadEngine) -> None:
        self._volume, self._engine = volume, engine
        self._starts, self._place_bytes = _starts(plan)

    @classmethod
    def make(cls, plan: GenerationPlan, directories: Sequence[Path], sink: Sink) -> "CacheFile | None":
        """Reserve the space in `directories`; return None where the plan puts nothing on the drives.

        Raises:
            DiskFull: there is less space.
            StorageError: a file cannot be made.
            ConfigError: no directory is named.
        """
        total = plan.seats * _starts(plan)[1]
        if not total:
            return None
        if not directories:
            raise ConfigError("caches: the plan has some on the drives, but no directory is named; give --ssd DIR")
        weights = stripe_shares(directories) or (1,) * len(directories)
        files: list[DirectFile] = []
        try:
            for directory, size in zip(directories, Volume.file_bytes(total, weights, MIB), strict=True):
                files.append(DirectFile.nameless(directory, size, what="keys and values"))
        except BaseException:
            for file in files:
                file.close()
            raise
        engine = ThreadEngine(sink=sink)
        return cls(plan, Volume(files, weights, MIB, engine), engine)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._engine.bytes_read

    def read(self, place: int, block: int, into: Bytes) -> None:
        """Fill `into`, whole pages, from the beginning of that block's pages."""
        self._volume.read(place * self._place_bytes + self._starts[block], into).wait()

    def write(self, place: int, block: int, start: int, pages: Bytes) -> None:
        """Write whole pages behind the first `start` bytes."""
        self._volume.write(place * self._place_bytes + self._starts[block] + start, pages).wait()

    def close(self) -> None:
        """Give the space back."""
        self._engine.close()
        self._volume.close()


class SeatCache:
    """The parts of one seat's cache that are not where compute is, by block (from 1)."""

    def __init__(
        self,
        seat: Seat,
        place: int,
        plan: GenerationPlan,
        buffers: CacheBuffers,
        file: CacheFile | None,
        kept: Sequence[ChunkBorder] = (),
    ) -> None:
        self.place, self._seat, self._plan, self._buffers, self._file = place, seat, plan, buffers, file
        away = [block - 1 for block in range(1, plan.num_blocks + 1) if plan.caches.home(block) != COMPUTE]
        code = CACHE_CODES[plan.costs.coded.name] if plan.costs.coded is not None else None
        self._layers: dict[int, StoredLayer] = {
            block + 1: StoredLayer(found, by_inputs=block + 1 in plan.caches.inputs)
            for block, found in tier_layers(seat.calls, plan.tiered_blocks, code).items()
        }
        self._on_drive = dict.fromkeys(self._layers, 0)
        self._away: dict[int, Away] = {}
        self._all_away = len(away) == len(self._layers)
        for block in self._layers if kept else ():
            self._put(block, tokens_between_borders(kept, block - 1))

    @property
    def attends(self) -> bool:
        """Whether the host attends for the seat in the next pass: a token of each row comes in, and there are others."""
        hidden = self._seat.hidden
        one = self._plan.caches.attends and self._all_away and hidden is not None and hidden.shape[1] == 1
        return one and all(stored.layer.length for stored in self._layers.values())

    def lent(self, op: Op, block: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which `block`, that of `op`, can be run."""
        stored = self._layers.get(op.unit)
        if stored is None:
            return nullcontext()
        memory = self._at_compute(op)
        if self.attends and op.slot(Pool.CACHE_DEVICE) < 0:
            return attending_here(block, stored.layer, memory)
        if (errors := self._buffers.errors) is not None and errors.wants(op.unit):
            return errors.of(op.unit, block, stored.layer, memory)
        return stored.used(memory, *self._called(op))

    def together(self, op: Op) -> AbstractContextManager[None]:
        """Return a context in which all uses of the block of `op` count as one."""
        stored = self._layers.get(op.unit)
        return stored.layer.together() if stored is not None else nullcontext()

    def memory(self, op: Op) -> torch.Tensor | None:
        """Return where the tokens of the block of `op` lie while it runs; None where its layer has them itself."""
        return self._at_compute(op) if op.unit in self._layers else None

    def recompute(self, op: Op, run: RunBlock) -> None:
        """Make keys and values of the block's inputs that are stored; `run` runs the block."""
        if (stored := self._layers.get(op.unit)) is not None:
            stored.recompute(self._at_compute(op), *self._called(op), run)

    def query(self, op: Op, block: nn.Module, run: Callable[[], None]) -> None:
        """Let the seat `run` into a block of the device, up to its attention.

        Raises:
            StepFailed: it asks for none.
        """
        layer = self._layers[op.unit].layer
        away = self._away[op.unit] = Away(layer, self._buffers.carried[self.place], self._seat.wait)

        def run_with() -> None:
            with using(away), layer.attended(away):
                run()

        with named(block):
            if self._seat.work(run_with):
                raise StepFailed(f"unit {op.unit}: it asks for no attention, though its cache grows")

    def query_out(self, op: Op, machine: Machine) -> None:
        """Copy what the host needs from the device."""
        size = self._away[op.unit].down_bytes
        machine.copy(torch.from_numpy(self._carried_host[:size]), self._buffers.carried[self.place][:size])

    def attend(self, op: Op) -> None:
        """Attend on the host; new keys and values are put behind the others."""
        self._away[op.unit].on_host(torch.from_numpy(self._carried_host), torch.from_numpy(self._host(op)))

    def result_in(self, op: Op, machine: Machine) -> None:
        """Copy to the device what attention has made."""
        size = self._away[op.unit].up_bytes
        machine.copy(self._buffers.carried[self.place][:size], torch.from_numpy(self._carried_host[:size]))

    def is_within(self, unit: int) -> bool:
        """Return whether the seat waits within that block."""
        return unit in self._away

    def leave(self, unit: int) -> None:
        """Let the seat go on to the end of the block.

        Raises:
            StepFailed: it waits once more.
        """
        del self._away[unit]
        if not self._seat.go_on():
            raise StepFailed(f"unit {unit}: it asks for attention twice")

    def read(self, op: Op) -> None:
        """Bring what lies on the drives, and what waits for a full page, to one place in host memory."""
        if (stored := self._layers.get(op.unit)) is None:
            return
        stored.place()
        pages, into = self._on_drive[op.unit], self._host(op)
        if pages:
            assert self._file is not None, "what is on the drives is in a file"
            self._file.read(self.place, op.unit, into[:pages])
        waiting = self._buffers.tails[self.place][op.unit]
        into[pages : stored.num_bytes] = waiting[: stored.num_bytes - pages]

    def bring_in(self, op: Op, machine: Machine) -> None:
        """Copy what was read to the device."""
        if (stored := self._layers.get(op.unit)) is not None:
            stored.place()
            size = stored.num_bytes
            machine.copy(self._at_compute(op)[stored.start :][:size], torch.from_numpy(self._host(op)[:size]))

    def bring_out(self, op: Op, machine: Machine) -> None:
        """Copy new tokens' keys and values to the host."""
        if (stored := self._layers.get(op.unit)) is not None:
            new = slice(stored.bytes_before, stored.num_bytes)
            machine.copy(torch.from_numpy(self._host(op)[new]), self._at_compute(op)[stored.start :][new])

    def write(self, op: Op) -> None:
        """Write the pages that have become full, and let the rest wait."""
        if (stored := self._layers.get(op.unit)) is None:
            return
        found, size, before = self._host(op), stored.num_bytes, self._on_drive[op.unit]
        waiting = self._buffers.tails[self.place][op.unit]
        old = max(0, stored.bytes_before - before)
        found[before : before + old] = waiting[:old]  # what is made of inputs may lie there
        pages = size // self._plan.caches.page_bytes * self._plan.caches.page_bytes
        if pages > before:
            assert self._file is not None, "what goes to the drives goes into a file"
            self._file.write(self.place, op.unit, before, found[before:pages])
            self._on_drive[op.unit] = pages
        waiting[: size - pages] = found[pages:size]

    def _put(self, block: int, tokens: torch.Tensor) -> None:
        """Put kept tokens where those of the block live."""
        if (home := self._plan.caches.home(block)) == COMPUTE:
            self._buffers.resident[self.place][block][: tokens.numel()].copy_(tokens)
        elif home == HOST:
            self._buffers.kept[self.place][block][: tokens.numel()] = tokens.numpy()
        else:
            pages = tokens.numel() // self._plan.caches.page_bytes * self._plan.caches.page_bytes
            if pages:
                assert self._file is not None, "what goes to the drives goes into a file"
                aligned = huge_page_buffer(pages)
                aligned[:] = tokens[:pages].numpy()
                self._file.write(self.place, block, 0, aligned)
                self._on_drive[block] = pages
            self._buffers.tails[self.place][block][: tokens.numel() - pages] = tokens[pages:].numpy()

    @property
    def _carried_host(self) -> Bytes:
        return self._buffers.carried_host[self.place]

    def _host(self, op: Op) -> Bytes:
        """Return an operation's bytes of the block in host memory, as they are stored: on their way, or where they live."""
        slot = op.slot(Pool.CACHE_HOST)
        if slot < 0:
            return self._buffers.kept[self.place][op.unit]
        whole = self._buffers.on_its_way[slot]
        return whole if self._plan.separate_device else whole[self._layers[op.unit].start :]

    def _at_compute(self, op: Op) -> torch.Tensor:
        """Return the memory of an operation's block where compute is."""
        slot = op.slot(Pool.CACHE_DEVICE)
        if slot >= 0:
            return self._buffers.on_device[slot]
        slot = op.slot(Pool.CACHE_HOST)
        if slot < 0 and self._plan.caches.home(op.unit) == COMPUTE:
            return self._buffers.resident[self.place][op.unit]
        return torch.from_numpy(self._buffers.on_its_way[slot] if slot >= 0 else self._buffers.kept[self.place][op.unit])

    def _called(self, op: Op) -> tuple[torch.Tensor, BlockCall]:
        """Return what an operation's block is run on, and how it is called."""
        assert self._seat.hidden is not None, "a seat of a pass is parked"
        return self._seat.hidden, self._seat.calls[op.unit - 1]


def _starts(plan: GenerationPlan) -> tuple[dict[int, int], int]:
    """Return where in a place each block's pages begin, and the bytes of a place."""
    starts, end = {}, 0
    for block in plan.caches.blocks(SSD):
        starts[block] = end
        end += cache_drive_bytes(plan.caches, plan.most_costs, plan.new_tokens, block)
    return starts, end


def _cut(flat: _Flat, sizes: dict[int, int]) -> dict[int, _Flat]:
    """Cut an array or a tensor into consecutive parts."""
    found, start = dict[int, Any](), 0
    for block, size in sizes.items():
        found[block] = flat[start : start + size]
        start += size
    return found
