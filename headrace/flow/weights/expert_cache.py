"""Experts that stay in host memory: those that most tokens were sent to, not those used last.

They are chosen by how many tokens were sent to each expert, and chosen again after 1, 2, 4, 8, ... passes: so at first the
choice follows what is generated, and then it stays. An expert that is chosen and not there yet stays when it next comes anyway.
So does a new one, until the next choice, if no chosen one wants the place. Nothing is read for the cache alone.

Invariant: between two choices an expert in the cache is neither moved nor overwritten.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from headrace.machine.host_memory import Bytes

Expert = tuple[int, int]  # unit and number


class ExpertCache:
    """Places for experts. `find`, `admit` and `arrived` may be called from several threads.

    Whoever admits an expert reads it into its place, and says when it has arrived. Until then others do not find it.
    """

    def __init__(self, places: Sequence[Bytes]) -> None:
        self._places = tuple(places)
        self._free = list(range(len(places)))
        self._held: dict[Expert, int] = {}
        self._coming: set[Expert] = set()
        self._kept: frozenset[Expert] | None = None  # None: before the first choice, whatever comes first is kept
        self._awaited = 0  # chosen experts that are not there yet
        self._lock = threading.Lock()
        self._passes, self._next = 0, 1
        self.tokens: Counter[Expert] = Counter()

    @property
    def held(self) -> frozenset[Expert]:
        """The experts that are there."""
        return frozenset(self._held)

    def find(self, expert: Expert) -> Bytes | None:
        """Return the place of an expert, None if it is not there."""
        with self._lock:
            index = self._held.get(expert) if expert not in self._coming else None
        return None if index is None else self._places[index]

    def admit(self, expert: Expert) -> Bytes | None:
        """Return a place for an expert that is to be read, if nobody reads it, and there is room that no chosen one wants; else
        None.
        """
        with self._lock:
            if not self._free or expert in self._held:
                return None
            chosen = self._kept is not None and expert in self._kept
            if not chosen and len(self._free) <= self._awaited:
                return None
            self._awaited -= chosen
            index = self._held[expert] = self._free.pop()
            self._coming.add(expert)
        return self._places[index]

    def arrived(self, experts: Iterable[Expert]) -> None:
        """Say that experts lie in their places, if they were admitted."""
        with self._lock:
            self._coming.difference_update(experts)

    def after_pass(self) -> None:
        """Count a pass, and choose again after some. Nothing may be reading or computing."""
        self._passes += 1
        if self._passes < self._next or len(self._places) == 0:
            return
        self._next *= 2
        # Of experts with equally many tokens, those that are there stay.
        order = sorted(self.tokens, key=lambda each: (-self.tokens[each], each not in self._held, each))
        self._kept = frozenset(order[: len(self._places)])
        for expert in [each for each in self._held if each not in self._kept]:
            self._free.append(self._held.pop(expert))
        self._awaited = len(self._kept) - len(self._held)
