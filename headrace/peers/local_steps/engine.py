"""A learner's engine: a whole run of this machine's own, whose weights now and then become those that all learners share.

Invariant: the run's record says which shared version its weights began with, and a file has that version's numbers.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray

from headrace.engine.trainer import Engine
from headrace.peers.local_steps.masters import Masters
from headrace.peers.local_steps.number_file import NumberFile
from headrace.update.combinations import refuse_in_local_steps
from headrace.update.sites.travel import Travel

# What travels of a unit, and what its rounding leaves.
Sent = tuple[NDArray[Any], NDArray[Any]]


class Learner(Engine):
    """An engine whose trained numbers can be compared with others, and replaced by them. Its rule's moments stay."""

    _check = staticmethod(refuse_in_local_steps)
    _may_learn_rows = False

    @cached_property
    def masters(self) -> Masters:
        """The trained numbers; between steps, after `rest`, they can be read."""
        return Masters(self.store, self._subject.maker, self._subject.seams.wire)

    def numbers(self) -> Iterator[NDArray[Any]]:
        """Yield each unit's numbers, float32."""
        self.rest()
        yield from (self.masters.read(unit).numpy() for unit in range(len(self.masters.counts)))

    def displacement(self, base: NumberFile, travel: Travel, error: NumberFile | None = None) -> Iterator[Sent]:
        """Yield for each unit how far its numbers are from `base` (base minus now) as it travels, with the `error` that earlier
        rounding left, and what rounding leaves now.
        """
        for unit, numbers in enumerate(self.numbers()):
            wanted = torch.from_numpy(base.read(unit) - numbers)
            if error is not None:
                wanted += torch.from_numpy(error.read(unit))
            values = travel.encode(wanted)
            yield values, wanted.sub_(travel.decode(values, wanted.numel())).numpy()

    def adopt(self, numbers: NumberFile, position: Any) -> None:
        """Replace all trained numbers, and commit that together with the `position`."""
        self.rest()
        for unit in range(len(numbers.counts)):
            self.masters.write(unit, torch.from_numpy(numbers.read(unit)))
        self.note(position)

    def note(self, position: Any) -> None:
        """Commit another `position` after the newest step."""
        self.flush()
        self.store.commit({**self.store.record, "position": position})
        self.position = position
