"""Where this process stands among those that torchrun started together."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Process `rank` of `size`; on its machine `local_rank` of `local_size`. They meet at a store at `address` and `port`.

    `hosts`: rank 0 makes that store. `meeting` names this start among all; `again`: it is no first start.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosts: bool
    meeting: str
    again: bool

    @property
    def machine(self) -> range:
        """The ranks of this machine, which torchrun numbers one after another."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)
