"""The host copy of weights that the ranks of one machine have together, and how they take turns in it.

Each rank writes its own part of a unit, and all read all of it. Invariants: a rank writes into a place only once every rank of
the machine has done with what lay there (`clear`). None reads what was written before all have written (`Ranks.gather`).
"""

import threading
from collections import Counter
from contextlib import suppress

import numpy as np

from headrace.machine.host_memory import Bytes, huge_page_buffer
from headrace.peers.meet.lane import END_SECONDS, Channel
from headrace.peers.meet.ranks import Ranks
from headrace.peers.meet.shared_memory import SharedMemory
from headrace.peers.meet.talk import agree
from headrace.terms.closing import Closing
from headrace.terms.errors import PeerLost, StorageError


class SharedCopy(Closing):
    """The memory that this rank of `ranks` has with its neighbours, the other ranks of its machine.

    `sharers` is how many they are; 1 where they cannot share memory, or where there are none. It `is_used` if any ranks share.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._memory: SharedMemory | None = None
        self._content: Bytes | None = None
        can = len(ranks.machine) > 1 and self._open(1) is not None
        self.drop()
        self.sharers = len(ranks.machine) if can else 1
        if "clear" in ranks.lanes:
            ranks.share(can=can)
        self.is_used = any(len(each) > 1 for each in ranks.sharing)
        self._clearing = _Clearing(ranks.lanes["clear"], ranks.neighbours) if can else None

    def map(self, num_bytes: int) -> Bytes:
        """Return memory of this size that all ranks of the machine have together; all call this at the same time. It is this
        rank's own where it is alone.

        Raises:
            PeerLost: a rank is gone. StorageError: the kernel gives no such memory.
        """
        self.drop()
        if self.sharers == 1:
            self._content = huge_page_buffer(num_bytes)
            return self._content
        memory = self._open(num_bytes)
        if memory is None:
            raise StorageError(f"shared memory: a rank of this machine cannot have {num_bytes} bytes; give less host_memory")
        self._content = memory.content
        return self._content

    def _open(self, num_bytes: int) -> SharedMemory | None:
        """Return memory that the first rank of the machine makes, and all others can reach; None if one of them cannot."""
        control, machine = self._ranks.control, self._ranks.machine
        is_first = self._ranks.rank == machine[0]
        with suppress(OSError):
            self._memory = SharedMemory.make(num_bytes) if is_first else None
        address = agree(control, {"memory": self._memory.address if self._memory else None}, {}, machine)[0]["memory"]
        with suppress(OSError):
            if address and not is_first:
                self._memory = SharedMemory.at(address, num_bytes)
        can = agree(control, {"can": self._memory is not None}, {"can": bool}, machine)
        return self._memory if all(each["can"] for each in can) else None

    def holds(self, part: Bytes) -> bool:
        """Return whether `part` lies in the memory of all."""
        return self._offset(part) is not None

    def clear(self, part: Bytes) -> None:
        """Say that this rank has done with what lies in `part`, and wait until all have. Threads may call it at once.

        Raises:
            PeerLost: a rank is gone.
        """
        place = self._offset(part)
        if place is not None and self._clearing is not None:
            self._clearing.meet(place)

    def _offset(self, part: Bytes) -> int | None:
        """Return where `part` begins in the memory of all; None if it lies elsewhere."""
        if self._content is None:
            return None
        offset = part.ctypes.data - self._content.ctypes.data
        return offset if 0 <= offset < self._content.size else None

    @property
    def resident_bytes(self) -> int:
        """This rank's share of what is resident of the memory."""
        memory = self._memory
        return 0 if memory is None else memory.resident_bytes // self.sharers

    def drop(self) -> None:
        """Let the memory go, once nobody uses arrays in it."""
        memory, self._memory, self._content = self._memory, None, None
        if memory is not None:
            memory.close()

    def close(self) -> None:
        """See `drop`; end the threads, once their lane is closed."""
        self.drop()
        if self._clearing is not None:
            self._clearing.close()


class _Clearing:
    """Counts how often each neighbour has done with a place. A thread for each takes its words, whenever they come."""

    def __init__(self, lane: Channel, neighbours: list[int]) -> None:
        self._lane, self._neighbours = lane, neighbours
        self._sending, self._changed = threading.Lock(), threading.Condition()
        self._done = {rank: Counter[int]() for rank in (lane.rank, *neighbours)}
        self._failure: PeerLost | None = None
        self._threads = [
            threading.Thread(target=self._hear, args=(rank,), name=f"headrace {lane.name} of rank {rank}", daemon=True)
            for rank in neighbours
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait for the threads: one that leaves a transfer while Python ends would end the process with an abort."""
        for thread in self._threads:
            thread.join(END_SECONDS)

    def meet(self, place: int) -> None:
        """Say that this rank has done with a place once more, and wait until all have as often."""
        with self._sending:
            wanted = self._done[self._lane.rank][place] + 1
            self._done[self._lane.rank][place] = wanted
            for rank in self._neighbours:
                self._lane.send(np.array([place], np.int64).view(np.uint8), rank)
        with self._changed:
            self._changed.wait_for(lambda: self._failure or all(self._done[rank][place] >= wanted for rank in self._neighbours))
            if self._failure is not None:
                raise PeerLost(str(self._failure))

    def _hear(self, rank: int) -> None:
        place = np.empty(1, np.int64)
        try:
            while True:
                self._lane.receive(place.view(np.uint8), rank)
                with self._changed:
                    self._done[rank][int(place[0])] += 1
                    self._changed.notify_all()
        except PeerLost as lost:
            with self._changed:
                self._failure = PeerLost(str(lost))  # a new one: its traceback would hold the connection
                self._changed.notify_all()
