"""Prompts of which something is kept: what they take from kept prefixes as they enter, and leave there as they are read."""

import contextlib
import hashlib
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import headrace
from headrace.codec.cache_codes import CACHE_CODES
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.plan.plan import GenerationPlan
from headrace.model.blocks.taps import BlockCall
from headrace.model.caches.border_bytes import border_from, bytes_of_border
from headrace.model.caches.borders import BlockBorder, ChunkBorder, cache_from, chunk_border_of
from headrace.model.caches.prefixes import Prefixes, PromptReader
from headrace.model.caches.tiered_cache import cache_of
from headrace.model.seats.seats import Seat, Seated
from headrace.store.copied_files import WeightFiles
from headrace.store.prefix_files import PrefixFiles
from headrace.terms.errors import ConfigError

Borders = Prefixes[ChunkBorder]


class BordersOnDrive:
    """Borders in files."""

    def __init__(self, files: PrefixFiles) -> None:
        self._files = files

    def read(self, owner: Hashable, tokens: tuple[int, ...]) -> ChunkBorder | None:
        """See `Drive`."""
        content = self._files.read(owner, tokens)
        return None if content is None else border_from(content)

    def write(self, owner: Hashable, tokens: tuple[int, ...], kept: ChunkBorder) -> None:
        """See `Drive`."""
        self._files.write(owner, tokens, bytes_of_border(kept))


class PromptOnItsWay:
    """One prompt; `reader` is its place in the trees, whose chunks have `length` tokens. Close it."""

    def __init__(self, reader: PromptReader[ChunkBorder], length: int, blocks: int) -> None:
        self.cached_tokens = len(reader.found) * length
        self._reader, self._length = reader, length
        self._read = len(reader.found)  # chunks before the running pass
        self._new: list[list[BlockBorder | None]] = [[None] * blocks for _ in reader.missing]

    def cache(self, config: Any, plan: GenerationPlan, device: torch.device) -> Any:
        """Return the cache that was kept of its beginning; None where nothing was."""
        if not self.cached_tokens:
            return None
        code = CACHE_CODES[plan.costs.coded.name] if plan.costs.coded is not None else None
        return cache_from(config, self.kept, device, plan.tiered_blocks, code)

    @property
    def kept(self) -> Sequence[ChunkBorder]:
        """What was kept of its chunks."""
        return self._reader.kept

    def enter(self, seat: Seat) -> None:
        """Give the seat what modules kept at the last border."""
        seat.cached_tokens = self.cached_tokens
        for kept, block in zip(seat.kept, self.kept[-1].blocks if self.kept else (), strict=False):
            if kept is not None:
                kept.take([each.clone() if isinstance(each, torch.Tensor) else each for each in block.modules])

    def passed(self, unit: int, number: int, call: BlockCall, memory: torch.Tensor | None) -> None:
        """Take note that its chunk `number` of this pass has passed block `unit`, which was called with `call`."""
        at = self._read + number - self.cached_tokens // self._length
        if at < len(self._new):
            cache, before = cache_of(call), (self._read + number) * self._length
            layer = cache.layers[unit - 1] if cache is not None and unit <= len(cache.layers) else None
            self._new[at][unit - 1] = chunk_border_of(layer, before, call.kept, memory)

    def after_pass(self, chunks: int) -> bool:
        """Keep what this pass has read in so many chunks; return whether the prompt has been read as far as it is kept."""
        start = self._read - self.cached_tokens // self._length
        self._reader.fill([ChunkBorder(tuple(filter(None, blocks))) for blocks in self._new[start : start + chunks]])
        self._read += chunks
        return start + chunks >= len(self._new)

    def close(self) -> None:
        """Let go of what is kept."""
        self._reader.end()


class KeptPrompts:
    """The trees of what is kept, `prefixes`, None where nothing is; and the prompts on their way, `by_seat`. Close it."""

    def __init__(self) -> None:
        self.prefixes: Borders | None = None
        self.by_seat: dict[Seated, PromptOnItsWay] = {}
        self._blocks, self._files = 0, contextlib.ExitStack()

    def use(self, plan: GenerationPlan, model: GenerationModel, directories: Sequence[Path]) -> None:
        """Begin anew as `plan` says; on a drive lies what earlier servers left there.

        Raises:
            ConfigError: the weights are not those of files, so that what is on a drive could not be told apart.
            StorageError: the drive cannot be written to.
        """
        self.close()
        if (asked := plan.prefixes) is None:
            return
        drive, self._blocks = None, plan.num_blocks
        if asked.ssd_bytes:
            files = PrefixFiles(directories[0], identity_of_prefixes(model, plan), asked.ssd_bytes)
            self._files.callback(files.close)
            drive = BordersOnDrive(files)
        self.prefixes = Prefixes(asked.chunk, asked.chunk_bytes, asked.memory_bytes, drive)

    def is_being_read(self, owner: Hashable, prompt: tuple[int, ...]) -> bool:
        """Return whether a seat is reading a chunk of this prompt, which is kept: it is worth waiting for."""
        return self.prefixes is not None and self.prefixes.is_being_read(owner, prompt)

    def begin(self, owner: Hashable, prompt: tuple[int, ...]) -> PromptOnItsWay | None:
        """Begin a prompt; None where nothing is kept."""
        if self.prefixes is None:
            return None
        return PromptOnItsWay(self.prefixes.read(owner, prompt), self.prefixes.length, self._blocks)

    def enters(self, seat: Seat, prompt: PromptOnItsWay) -> None:
        """Note that a prompt has its seat."""
        prompt.enter(seat)
        self.by_seat[seat] = prompt

    def of(self, seat: Seated) -> Sequence[ChunkBorder]:
        """Return what was kept of the prompt of a seat that enters."""
        return self.by_seat[seat].kept if seat in self.by_seat else ()

    def after_pass(self, chunks: Mapping[Seated, int]) -> None:
        """Keep what a pass has read, which took so many chunks for each seat."""
        for seat in [each for each, prompt in self.by_seat.items() if prompt.after_pass(chunks[each])]:
            self.let_go(seat)

    def let_go(self, seat: Seated) -> None:
        """Forget a seat."""
        if (prompt := self.by_seat.pop(seat, None)) is not None:
            prompt.close()

    def close(self) -> None:
        """Write to the drive what has room there; the memory is free."""
        if self.prefixes is not None:
            self.prefixes.spill()
        self.prefixes = None
        self._files.close()


def identity_of_prefixes(model: GenerationModel, plan: GenerationPlan) -> str:
    """Return what decides the bits of keys and values, and the chat template.

    Raises:
        ConfigError: the weights are not those of files.
    """
    paths = getattr(model.source, "paths", ())
    if not paths:
        raise ConfigError("prefix_ssd: the weights are those of an unfinished run, which change; leave it out")
    adapter = sorted(model.here.adapter.glob("*.safetensors")) if model.here.adapter is not None else []
    digests = [WeightFiles.of(each).digest() if each else "" for each in (paths, adapter)]
    config = hashlib.sha256(repr(model.chain.config.to_dict()).encode()).hexdigest()
    ways = (plan.compute_dtype, plan.narrow_rows, plan.packed_rows, model.chain.wide_products, torch.get_num_threads())
    code = plan.costs.coded.name if plan.costs.coded is not None else ""
    versions = (headrace.__version__, torch.__version__, transformers.__version__, str(model.machine.device))
    template = getattr(model.tokenizer(), "chat_template", "")
    return repr((digests, config, ways, code, versions, template, plan.prefixes and plan.prefixes.chunk))
