"""Which samples run together, of several rows or of one, and how many calls of a block a micro-batch then takes.

Pure: `model.blocks.sample_groups` makes tensors of the groups, and plans count them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Layers with a state work on chunks of the row of at most so many tokens: a shorter sample takes as much as a chunk.
_CHUNK_TOKENS = 256
# Samples shorter than this are run together, whatever their lengths: a call costs more than it computes.
_SHORT_TOKENS = 64
# A sample shorter than this share of the group's longest would need too much padding.
_SHORTEST_PART = 0.75


def grouped(samples: Sequence[tuple[int, int]], rows: int, length: int, exact: bool) -> list[list[tuple[int, int]]]:
    """Return the samples, (first place, tokens), of rows (rows, length) in groups, the longest first; none where every row is
    one sample. `exact`: samples share a group only if they have one length.
    """
    if len(samples) == rows:
        return []
    groups: list[list[tuple[int, int]]] = []
    for sample in sorted(samples, key=lambda sample: (-sample[1], sample[0])):
        longest = groups[-1][0][1] if groups else 0
        alike = sample[1] == longest if exact else longest <= _SHORT_TOKENS or sample[1] >= _SHORTEST_PART * longest
        taken = max(longest, min(length, _CHUNK_TOKENS)) * (len(groups[-1]) + 1) if groups else 0
        if groups and alike and taken <= rows * length:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def padded_together(lengths: Sequence[int], exact_from: int | None) -> list[list[int]]:
    """Return the places of rows of these `lengths` in groups, in their order: those of a group may be padded to its longest.
    Rows of `exact_from` tokens or more share a group only if they have one length; None: all rows share one.
    """
    groups: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        groups.setdefault(0 if exact_from is None or length < exact_from else length, []).append(place)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class Groups:
    """What groups of samples of one length make of a micro-batch, on average: `calls` of a block, and the share of a whole
    row's operations of `attention` that is left.
    """

    calls: float
    attention: float


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The rows with which a run begins: the lengths of each one's samples, which add up to `sequence_length`. No rows: nothing
    is packed.
    """

    sequence_length: int
    samples: tuple[tuple[int, ...], ...] = ()

    def groups(self, rows: int, rows_per_step: int) -> Groups | None:
        """Return the groups of samples of one length in micro-batches of up to `rows` rows; None if each is one call."""
        length, calls, squares = self.sequence_length, list[int](), 0
        for step in range(0, len(self.samples), rows_per_step):
            of_step = self.samples[step : step + rows_per_step]
            for start in range(0, len(of_step), rows):
                part = of_step[start : start + rows]
                samples = [(0, tokens) for row in part for tokens in row]
                calls.append(max(1, len(grouped(samples, len(part), length, exact=True))))
                squares += sum(tokens * tokens for _, tokens in samples)
        if sum(calls) == len(calls):
            return None
        return Groups(sum(calls) / len(calls), squares / (len(self.samples) * length * length))
