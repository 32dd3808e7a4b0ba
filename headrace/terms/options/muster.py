"""How many workers a node begins with, takes in, and goes on with."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Muster:
    """A node begins with `least` workers and takes in up to `most`. Who is missing is waited for, `grace_seconds` long, before
    it goes on with those that are left. `limit` says why there are no more than `most`, if the run itself limits them.
    """

    least: int
    most: int
    grace_seconds: float = 10.0
    limit: str = ""

    @classmethod
    def of(cls, workers: int | str, grace_seconds: float = 10.0) -> Self:
        """Return what the option `workers` asks for: N, or MIN:MAX."""
        least, _, most = str(workers).partition(":")
        return cls(int(least), int(most or least), grace_seconds)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change during the run."""
        return self.least < self.most

    def enough(self, present: int, expected: int, waited_seconds: float) -> bool:
        """Return whether to begin with those that are `present`, where `expected` have been there before."""
        if present < self.least:
            return False
        return present >= min(self.most, expected) or waited_seconds >= self.grace_seconds
