"""Trees of kept chunks, against a plain list of what was read: random prompts of several owners, come and go in any order."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.model.caches.prefixes import Prefixes, PromptReader

LENGTH, EXPECTED = 2, 10


@dataclass(frozen=True)
class Piece:
    """Stands for what a chunk leaves: the prompt up to its end."""

    owner: int
    tokens: tuple[int, ...]
    num_bytes: int


Prompt = tuple[int, tuple[int, ...]]
PROMPTS = st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple))
# A prompt comes; or the first of those under way reads a chunk, or goes.
ACTS = st.lists(st.one_of(PROMPTS, st.sampled_from(["read", "go"])), max_size=60)


class Walk:
    """A tree, and the prompts that are under way."""

    def __init__(self, room: int, actual: int) -> None:
        self.tree: Prefixes[Piece] = Prefixes(LENGTH, EXPECTED, room * EXPECTED)
        self.room, self.actual = room, actual
        self.way: list[tuple[Prompt, PromptReader[Piece]]] = []

    def come(self, prompt: Prompt) -> None:
        owner, tokens = prompt
        reader = self.tree.read(owner, tokens)
        for number, piece in enumerate(reader.kept, start=1):
            assert (piece.owner, piece.tokens) == (owner, tokens[: number * LENGTH])
        assert len(reader.found) * LENGTH < len(tokens)
        assert (len(reader.found) + len(reader.missing)) * LENGTH <= len(tokens)
        self.way.append((prompt, reader))

    def read(self) -> None:
        for (owner, tokens), reader in self.way:
            if reader.filled < len(reader.missing):
                end = (len(reader.found) + reader.filled + 1) * LENGTH
                reader.fill([Piece(owner, tokens[:end], self.actual)])
                return

    def go(self) -> None:
        if self.way:
            self.way.pop(0)[1].end()

    def check(self) -> None:
        tree, held = self.tree, {chunk for _, reader in self.way for chunk in (*reader.found, *reader.missing)}
        assert tree.num_bytes == sum(chunk.num_bytes for chunk in tree._by_use)
        if self.actual <= EXPECTED:
            assert tree.num_bytes <= tree.most_bytes
        assert held <= set(tree._by_use)
        for chunk in tree._by_use:
            assert chunk.parent is not None
            assert chunk.parent.children[chunk.key] is chunk
            assert chunk.parent.parent is None or chunk.parent in tree._by_use
        hanging = [chunk for root in tree._roots.values() for chunk in root.children.values()]
        assert all(root.children for root in tree._roots.values())
        while hanging:
            found = hanging.pop()
            assert found in tree._by_use
            hanging += found.children.values()


@settings(max_examples=150, deadline=None)
@given(ACTS, st.integers(0, 6), st.sampled_from([4, 10, 13]))
def test_what_is_found_was_read_and_bytes_stay_within_the_room(acts: list[object], room: int, actual: int) -> None:
    walk = Walk(room, actual)
    for act in acts:
        walk.read() if act == "read" else walk.go() if act == "go" else walk.come(act)  # type: ignore[arg-type]
        walk.check()
    while walk.way:
        walk.go()
        walk.check()
    assert all(chunk.kept is not None for chunk in walk.tree._by_use)
    assert walk.tree.num_bytes <= walk.tree.most_bytes or actual > EXPECTED


@given(st.lists(PROMPTS, max_size=12))
def test_with_room_each_chunk_is_read_once(prompts: list[Prompt]) -> None:
    tree: Prefixes[Piece] = Prefixes(LENGTH, EXPECTED, 1000 * EXPECTED)
    read = list[Prompt]()
    for owner, tokens in prompts:
        reader = tree.read(owner, tokens)
        begin = len(reader.found)
        ends = [(owner, tokens[: (begin + number) * LENGTH]) for number in range(1, len(reader.missing) + 1)]
        reader.fill([Piece(*each, EXPECTED) for each in ends])
        read += ends
        reader.end()
    wanted = {(owner, tokens[:end]) for owner, tokens in prompts for end in range(LENGTH, len(tokens) + 1, LENGTH)}
    assert sorted(read) == sorted(wanted)


def test_a_chunk_that_is_read_is_waited_for_and_one_that_is_given_up_is_not() -> None:
    tree: Prefixes[Piece] = Prefixes(LENGTH, EXPECTED, 100)
    reader = tree.read(0, (1, 2, 3))
    assert tree.is_being_read(0, (1, 2, 9, 9, 9))
    assert not tree.is_being_read(1, (1, 2, 9))
    assert not tree.is_being_read(0, (1, 1, 9))
    reader.end()
    assert not tree.is_being_read(0, (1, 2, 9, 9, 9))
    assert tree.num_bytes == tree.chunks == 0


def test_the_least_used_leaves_make_way_first() -> None:
    tree: Prefixes[Piece] = Prefixes(LENGTH, EXPECTED, 3 * EXPECTED)

    def read(*tokens: int) -> int:
        reader = tree.read(0, tokens)
        reader.fill([Piece(0, tokens, EXPECTED)] * len(reader.missing))
        found = len(reader.found)
        reader.end()
        return found

    assert read(1, 1, 2, 2) == read(3, 3) == 0
    assert read(1, 1, 2, 2, 0) == 2
    assert read(4, 4) == 0  # in the place of 3, 3
    assert [read(1, 1, 2, 2, 0), read(3, 3, 0)] == [2, 0]
    assert tree.dropped == 2
