"""Parts of units, and the shelves of a tier that hold some of them: which lies in which slot, and which leaves for another.

A *part* is what comes by itself of a unit: an expert, a module of a block, a range of rows of a head. A *shelf* has as many
slots as it may hold parts. Its *policy* says which part leaves when another comes. Whoever brings parts holds them, which pins
them, and releases them when nothing reads them any more.

Invariants: a part that is held never leaves; no slot has two parts; what a shelf has decides what must be brought, never bits.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.terms.layout import Runs


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What comes by itself of a unit: elements of these spans; of a stack, experts of these."""

    unit: int
    spans: Runs


class Place(NamedTuple):
    """A slot of a shelf for a part; whether the part `is_there`, or is to be brought."""

    slot: int
    is_there: bool


class Policy:
    """Which parts stay on a shelf. This one keeps all that came first: others find no place once it is full.

    A shelf calls it with its lock held, and never asks it about parts that are held.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots

    def wanted(self, part: Part, times: int) -> None:
        """Note that a part was wanted so many times, whether it is here or not."""

    def used(self, part: Part) -> None:
        """Note that a use of a part that is here has ended."""

    def admits(self, part: Part, num_free: int) -> bool:
        """Return whether a part may come into one of the free slots."""
        return True

    def leaving(self, idle: Sequence[Part]) -> Part | None:
        """Return which of these parts leaves a full shelf for one that comes; None: none does."""
        return None

    def after_pass(self, here: Sequence[Part]) -> Iterable[Part]:
        """Return which parts leave at the end of a pass."""
        return ()


class LastUsed(Policy):
    """The part whose last use is longest ago leaves."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self._uses: dict[Part, int] = {}
        self._count = 0

    def used(self, part: Part) -> None:
        """See `Policy.used`."""
        self._count += 1
        self._uses[part] = self._count

    def leaving(self, idle: Sequence[Part]) -> Part | None:
        """See `Policy.leaving`."""
        return min(idle, key=lambda part: self._uses.get(part, 0), default=None)


class MostWanted(Policy):
    """The parts that were wanted most stay, not those used last. They are chosen again after 1, 2, 4, 8, ... passes.

    So at first the choice follows what comes, and then it stays. A part that is chosen and not here yet stays when it next
    comes anyway. So does a new one, until the next choice, if no chosen one wants the slot. Nothing is brought for the shelf
    alone.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.times: Counter[Part] = Counter()
        self._chosen: frozenset[Part] | None = None  # None: before the first choice, whatever comes first stays
        self._awaited = 0  # chosen parts that are not here yet
        self._passes, self._next = 0, 1

    def wanted(self, part: Part, times: int) -> None:
        """See `Policy.wanted`."""
        self.times[part] += times

    def admits(self, part: Part, num_free: int) -> bool:
        """See `Policy.admits`."""
        chosen = self._chosen is not None and part in self._chosen
        if not chosen and num_free <= self._awaited:
            return False
        self._awaited -= chosen
        return True

    def after_pass(self, here: Sequence[Part]) -> Iterable[Part]:
        """See `Policy.after_pass`."""
        self._passes += 1
        if self._passes < self._next or self.num_slots == 0:
            return ()
        self._next *= 2
        # Of parts that were wanted equally often, those that are here stay.
        there = frozenset(here)
        order = sorted(self.times, key=lambda each: (-self.times[each], each not in there, each))
        self._chosen = frozenset(order[: self.num_slots])
        leaving = [part for part in here if part not in self._chosen]
        self._awaited = len(self._chosen) - (len(here) - len(leaving))
        return leaving


# By the name that a plan has for them.
POLICIES: dict[str, Callable[[int], Policy]] = {
    "keep-all": Policy,
    "last-used": LastUsed,
    "most-wanted": MostWanted,
}


class Shelf:
    """Slots 0 to `num_slots` - 1 for parts, which come and leave by a policy of this name. Several threads may use it."""

    def __init__(self, num_slots: int, policy: str) -> None:
        self.policy, self._lock = POLICIES[policy](num_slots), threading.Lock()
        self._free = list(range(num_slots))
        self._slots: dict[Part, int] = {}
        self._coming: set[Part] = set()
        self._leaving: set[Part] = set()  # as soon as nobody holds them
        self._pins: Counter[Part] = Counter()

    @property
    def parts(self) -> frozenset[Part]:
        """The parts that have a slot."""
        return frozenset(self._slots)

    def hold(self, part: Part) -> Place | None:
        """Pin a part to its slot until it is released. None: it has none, or somebody else is bringing it.

        Where it is not there, the caller brings it, and says when it has `arrived`.
        """
        with self._lock:
            slot = self._slots.get(part)
            if slot is None:
                slot = self._slot_for(part)
                if slot is None:
                    return None
                self._slots[part] = slot
                self._coming.add(part)
                self._pins[part] += 1
                return Place(slot, False)
            if part in self._coming:
                return None
            self._pins[part] += 1
            return Place(slot, True)

    def arrived(self, parts: Iterable[Part]) -> None:
        """Say that parts lie in their slots."""
        with self._lock:
            self._coming.difference_update(parts)

    def release(self, parts: Iterable[Part]) -> None:
        """End a use of each of these parts, which were held."""
        with self._lock:
            for part in parts:
                assert self._pins[part] > 0, "it is held"
                self._pins[part] -= 1
                self.policy.used(part)
                if part in self._leaving:
                    self._leave(part)

    def want(self, part: Part, times: int) -> None:
        """Note that a part is wanted so many times."""
        with self._lock:
            self.policy.wanted(part, times)

    def after_pass(self) -> None:
        """End a pass: some parts leave, those that are held as soon as they are not."""
        with self._lock:
            self._leaving.clear()
            for part in list(self.policy.after_pass(tuple(self._slots))):
                self._leave(part)

    def clear(self) -> None:
        """Forget all parts, of which none is held: what they are made of may change."""
        with self._lock:
            assert not +self._pins, "a part is held"
            self._free += self._slots.values()
            self._slots.clear()
            self._leaving.clear()

    def _leave(self, part: Part) -> None:
        if self._pins[part]:
            self._leaving.add(part)
            return
        self._leaving.discard(part)
        self._free.append(self._slots.pop(part))

    def _slot_for(self, part: Part) -> int | None:
        if self._free:
            return self._free.pop() if self.policy.admits(part, len(self._free)) else None
        leaving = self.policy.leaving([each for each in self._slots if not self._pins[each]])
        return None if leaving is None else self._slots.pop(leaving)
