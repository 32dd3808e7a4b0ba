"""Beginnings of prompts whose keys and values are kept: trees of whole chunks, one tree for each owner.

Keys and values of a prompt are the same bits only where it is cut at the same borders. So all prompts are read in chunks of one
length from their first token, and only whole chunks are kept. Never part of one, and never what was decoded.

Invariants: a chunk is offered only once all its blocks have been read; what a reader has is never dropped; bytes stay within
`most_bytes`, least used leaves first.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

Tokens = tuple[int, ...]


class Sized(Protocol):
    """What is kept of a chunk."""

    @property
    def num_bytes(self) -> int:
        """Its bytes."""


Kept = TypeVar("Kept", bound=Sized)


class PrefixDrive(Protocol[Kept]):
    """Where chunks go that have no room in memory."""

    def read(self, owner: Hashable, tokens: Tokens) -> Kept | None:
        """Return what is kept of the chunk at the end of `tokens`; None where nothing is."""

    def write(self, owner: Hashable, tokens: Tokens, kept: Kept) -> None:
        """Keep it there."""


class PromptChunk(Generic[Kept]):
    """One chunk of a prompt behind its `parent`; `kept` None: a reader is at it. `key` are its tokens, of a root the owner."""

    def __init__(self, parent: "PromptChunk[Kept] | None", key: Any, num_bytes: int) -> None:
        self.parent, self.key, self.num_bytes = parent, key, num_bytes
        self.children: dict[Tokens, PromptChunk[Kept]] = {}
        self.kept: Kept | None = None
        self.readers = 0


class PromptReader(Generic[Kept]):
    """One prompt on its way: `found` are its chunks that were kept; it fills `missing`, in order. End it with `end`."""

    def __init__(self, tree: "Prefixes[Kept]", found: list[PromptChunk[Kept]], missing: list[PromptChunk[Kept]]) -> None:
        self.found, self.missing, self.filled = found, missing, 0
        self._tree = tree

    @property
    def kept(self) -> list[Kept]:
        """What is kept of the chunks that were found."""
        return [chunk.kept for chunk in self.found if chunk.kept is not None]

    def fill(self, kept: Sequence[Kept]) -> None:
        """Give what was read of the next chunks; those beyond `missing` are not kept."""
        for chunk, each in zip(self.missing[self.filled :], kept, strict=False):
            self._tree.complete(chunk, each)
            self.filled += 1

    def end(self) -> None:
        """Let go of the chunks; those that were not filled are as if nobody had begun them. It can be called twice."""
        for chunk in [*self.found, *self.missing]:
            chunk.readers -= 1
        for chunk in reversed(self.missing[self.filled :]):
            self._tree.drop(chunk)
        self.found, self.missing, self.filled = [], [], 0


class Prefixes(Generic[Kept]):
    """The trees. A chunk has `length` tokens and is expected to take `chunk_bytes`; all together at most `most_bytes`.

    What leaves goes to the `drive`, and comes from there when it is wanted.
    """

    def __init__(self, length: int, chunk_bytes: int, most_bytes: int, drive: PrefixDrive[Kept] | None = None) -> None:
        self._drive = drive
        self.length, self.most_bytes, self.num_bytes = length, most_bytes, 0
        self.read_tokens = self.found_tokens = self.dropped = 0
        self._chunk_bytes = chunk_bytes
        self._roots: dict[Hashable, PromptChunk[Kept]] = {}
        self._by_use: OrderedDict[PromptChunk[Kept], None] = (
            OrderedDict()
        )  # the least used first: leaves before what they hang on

    @property
    def chunks(self) -> int:
        """How many chunks there are, those that are being read among them."""
        return len(self._by_use)

    def is_being_read(self, owner: Hashable, tokens: Tokens) -> bool:
        """Return whether a reader is at a chunk that this prompt needs: it is worth waiting for."""
        return any(chunk.kept is None for chunk in self._path(owner, tokens))

    def read(self, owner: Hashable, tokens: Tokens) -> PromptReader[Kept]:
        """Begin a prompt of `owner`. At least one of its tokens is left to be read."""
        path = self._from_drive(owner, tokens, list(self._path(owner, tokens)))
        found = path[: next((at for at, chunk in enumerate(path) if chunk.kept is None), len(path))]
        found = found[: (len(tokens) - 1) // self.length]
        for chunk in found:
            chunk.readers += 1
        missing = list[PromptChunk[Kept]]()
        if len(found) == len(path):  # else a chunk is there: as the prompt's last, or in other hands
            for key in self._keys(tokens)[len(found) :]:
                if (added := self._added(owner, (missing or found)[-1:], key)) is None:
                    break
                added.readers = 1
                missing.append(added)
        for chunk in reversed([*path, *missing]):
            self._by_use.move_to_end(chunk)
        self.found_tokens += len(found) * self.length
        self.read_tokens += len(tokens) - len(found) * self.length
        return PromptReader(self, found, missing)

    def complete(self, chunk: PromptChunk[Kept], kept: Kept) -> None:
        """Keep what was read of a chunk; where that is more than expected, others make way."""
        self.num_bytes += kept.num_bytes - chunk.num_bytes
        chunk.kept, chunk.num_bytes = kept, kept.num_bytes
        while self.num_bytes > self.most_bytes and self._drop_least_used():
            pass

    def drop(self, chunk: PromptChunk[Kept]) -> None:
        """Forget a chunk that nothing hangs on."""
        assert chunk.parent is not None, "a root is no chunk"
        del chunk.parent.children[chunk.key], self._by_use[chunk]
        self.num_bytes -= chunk.num_bytes
        root = chunk.parent
        if root.parent is None and not root.children:
            del self._roots[root.key]

    def spill(self) -> None:
        """Write to the drive what is in memory, the most used first: the end."""
        for chunk in reversed(self._by_use) if self._drive is not None else ():
            self._write(chunk)

    def _write(self, chunk: PromptChunk[Kept]) -> None:
        if self._drive is None or chunk.kept is None:
            return
        keys, at = list[Tokens](), chunk
        while at.parent is not None:
            keys, at = [at.key, *keys], at.parent
        self._drive.write(at.key, tuple(token for key in keys for token in key), chunk.kept)

    def _from_drive(self, owner: Hashable, tokens: Tokens, path: list[PromptChunk[Kept]]) -> list[PromptChunk[Kept]]:
        """Return a prompt's chunks, with those behind `path` that the drive has and memory has room for."""
        if self._drive is None:
            return path
        held = list(path)
        for chunk in held:
            chunk.readers += 1
        for end in range((len(path) + 1) * self.length, len(tokens), self.length):
            if path and path[-1].kept is None:
                break
            if (kept := self._drive.read(owner, tokens[:end])) is None:
                break
            if (added := self._added(owner, path[-1:], tokens[end - self.length : end])) is None:
                break
            added.readers = 1
            held.append(added)
            path.append(added)
            self.complete(added, kept)
        for chunk in held:
            chunk.readers -= 1
        return path

    def _added(self, owner: Hashable, behind: Sequence[PromptChunk[Kept]], key: Tokens) -> PromptChunk[Kept] | None:
        """Return a new chunk behind one, or at the beginning; None where there is no room."""
        if not self._make_room():
            return None
        parent = behind[0] if behind else self._roots.setdefault(owner, PromptChunk(None, owner, 0))
        parent.children[key] = chunk = PromptChunk(parent, key, self._chunk_bytes)
        self._by_use[chunk] = None
        self.num_bytes += chunk.num_bytes
        return chunk

    def _make_room(self) -> bool:
        while self.num_bytes + self._chunk_bytes > self.most_bytes:
            if not self._drop_least_used():
                return False
        return True

    def _drop_least_used(self) -> bool:
        least = next((chunk for chunk in self._by_use if not chunk.readers and not chunk.children), None)
        if least is not None:
            self._write(least)
            self.drop(least)
            self.dropped += 1
        return least is not None

    def _path(self, owner: Hashable, tokens: Tokens) -> Iterator[PromptChunk[Kept]]:
        """Yield the chunks of a prompt that are there, from its beginning."""
        chunk = self._roots.get(owner)
        for key in self._keys(tokens):
            chunk = chunk.children.get(key) if chunk is not None else None
            if chunk is None:
                return
            yield chunk

    def _keys(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[at : at + self.length] for at in range(0, len(tokens) - self.length + 1, self.length)]
