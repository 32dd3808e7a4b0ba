"""How keys and values that live elsewhere reach a block and return: prefetched in the order of their use."""

from collections.abc import Sequence
from typing import Any

from headrace.generate.plan.cache_plan import COMPUTE, SSD, prompt_bytes, query_out_bytes, touched_bytes
from headrace.generate.plan.plan import GenerationPlan
from headrace.plan.schedules.ledger import Ledger
from headrace.terms.lanes import Lane
from headrace.terms.program import PIECE_SHIFT, Pool, Verb, buffer

_HOME, _ON_HOST, _ON_DEVICE = buffer(Pool.CACHE), buffer(Pool.CACHE_HOST), buffer(Pool.CACHE_DEVICE)
_HOST_CARRIED = buffer(Pool.HOST_CARRIED)


class Caches:
    """Emits the operations for one pass of `num_seats` seats; `first`: their prompts come in, and there is no cache yet.

    `attends` says for which seats the host attends, where it is known; () is a forecast.
    """

    def __init__(
        self, plan: GenerationPlan, ledger: Ledger, num_seats: int, *, first: bool, attends: Sequence[bool] = ()
    ) -> None:
        self._plan, self._ledger, self._first = plan, ledger, first
        # By seat: whether the host attends for it in this pass, which it does for single tokens that have a past.
        self._attends = tuple(attends) or (plan.caches.attends and not first,) * num_seats
        caches = plan.caches
        moving = [block for block in range(1, plan.num_blocks + 1) if caches.home(block) != COMPUTE]
        self._uses = [(block, seat) for block in moving for seat in range(num_seats)]
        self._brought: dict[tuple[int, int], tuple[int, ...]] = {}
        self._next = self._used = 0

    def bring(self, block: int, seat: int) -> tuple[int, ...]:
        """Read ahead; return the buffers that compute reads and appends to when `seat` enters `block`, () where all stays."""
        if self._plan.caches.home(block) == COMPUTE:
            return ()
        self._read_until(self._used + self._plan.caches.slots)
        self._used += 1
        return self._brought[block, seat][-1:]

    def recompute(self, block: int, seat: int, weights: tuple[int, ...], touched_bytes: int) -> None:
        """Make keys and values of inputs that have been brought, with `weights`, of which `touched_bytes` are read."""
        plan, found = self._plan, self._plan.costs.recomputing
        if block not in plan.caches.inputs or found is None:
            return
        # Of a prompt in chunks, those before the middle one are there in its passes.
        share = (plan.costs.first_passes - 1) / (2 * plan.costs.first_passes) if self._first else 1.0
        size: dict[str, Any] = {
            "num_bytes": round(share * (plan.costs.first_passes * touched_bytes + plan.costs.cache_bytes[block - 1])),
            "flops": share * found.flops[block - 1],
            "calls": round(share * found.calls[block - 1]),
        }
        self._ledger.op(Verb.RECOMPUTE, Lane.COMPUTE, weights, self._brought[block, seat][-1:], unit=block, micro=seat, **size)

    def attends(self, block: int, seat: int) -> bool:
        """Return whether the host attends in `block` for `seat`."""
        return self._attends[seat] and self._plan.caches.home(block) != COMPUTE

    def attend(self, block: int, seat: int, queried: int) -> None:
        """Attend on the host for what compute left in the buffer `queried`; `result` brings what that makes back there."""
        op, plan, costs = self._ledger.op, self._plan, self._plan.costs
        self.bring(block, seat)
        slots, place = self._brought.pop((block, seat)), _HOST_CARRIED + seat
        home, on_drive = _piece(block, seat), plan.caches.home(block) == SSD
        at: dict[str, Any] = {"unit": block, "micro": seat}
        tokens = costs.prompt_length + plan.new_tokens // 2
        down = query_out_bytes(costs, block, tokens)
        op(Verb.QUERY_OUT, Lane.DEVICE_TO_HOST, (queried,), (place,), num_bytes=down, **at)
        lies = (slots[0],) if on_drive else (home,)
        op(Verb.ATTEND, Lane.ATTENTION, (), (place, *lies), num_bytes=self.held_bytes(block), **at)
        if on_drive:
            op(Verb.CACHE_WRITE, Lane.SSD_WRITE, slots[:1], (home,), num_bytes=self._new_bytes(block), **at)
        self._read_until(self._used + plan.caches.slots)

    def result(self, block: int, seat: int, queried: int) -> None:
        """Bring what attention on the host has made to the buffer `queried`."""
        size: dict[str, Any] = {"num_bytes": self._plan.costs.next.result_bytes[block - 1], "unit": block, "micro": seat}
        self._ledger.op(Verb.RESULT_IN, Lane.HOST_TO_DEVICE, (_HOST_CARRIED + seat,), (queried,), **size)

    def keep(self, block: int, seat: int) -> None:
        """Take the new tokens' keys and values back, once the seat has passed the block."""
        if self._plan.caches.home(block) == COMPUTE:
            return
        op, slots = self._ledger.op, self._brought.pop((block, seat))
        home, on_drive = _piece(block, seat), self._plan.caches.home(block) == SSD
        size: dict[str, Any] = {"unit": block, "micro": seat, "num_bytes": self._new_bytes(block)}
        if self._plan.separate_device:
            into = (slots[0],) if on_drive else (home,)
            op(Verb.CACHE_OUT, Lane.DEVICE_TO_HOST, slots[-1:], into, **size)
        if on_drive:
            op(Verb.CACHE_WRITE, Lane.SSD_WRITE, slots[:1], (home,), **size)
        # At once, so that nothing large comes before it in its lane's queue.
        self._read_until(self._used + self._plan.caches.slots)

    def touched_bytes(self, block: int, seat: int) -> int:
        """Return what giving a seat's cache to attention takes, as bytes that are read: the host reads it in place."""
        held = self.held_bytes(block)
        return held if self.attends(block, seat) else touched_bytes(self._plan.costs, held, block)

    def held_bytes(self, block: int) -> int:
        """Return the bytes of a seat's cache of a block halfway through its answers; 0 in the first pass."""
        costs = self._plan.costs
        new = 0 if self._first else self._plan.new_tokens // 2 * costs.cache_token_bytes[block - 1]
        return self._of_prompt(costs.cache_bytes[block - 1]) + new

    def _moved_bytes(self, block: int) -> int:
        """Return those of them that come to a block: inputs may stand for keys and values."""
        costs, caches = self._plan.costs, self._plan.caches
        return self.held_bytes(block) - self._of_prompt(costs.cache_bytes[block - 1] - prompt_bytes(caches, costs, block))

    def _of_prompt(self, num_bytes: int) -> int:
        """Return the part of a prompt's bytes that was there before the pass: on average, half of the other chunks'."""
        passes = self._plan.costs.first_passes
        return num_bytes * (passes - 1) // (2 * passes) if self._first else num_bytes

    def _new_bytes(self, block: int) -> int:
        costs = self._plan.costs
        new = prompt_bytes(self._plan.caches, costs, block) // costs.first_passes
        return new if self._first else costs.cache_token_bytes[block - 1]

    def _read_until(self, end: int) -> None:
        while self._next < min(end, len(self._uses)):
            self._read(self._next)
            self._next += 1

    def _read(self, number: int) -> None:
        plan, op, (block, seat) = self._plan, self._ledger.op, self._uses[number]
        slot = number % plan.caches.slots
        home, found = _piece(block, seat), list[int]()
        size: dict[str, Any] = {"unit": block, "micro": seat, "num_bytes": self._moved_bytes(block)}
        if plan.caches.home(block) == SSD:
            found.append(_ON_HOST + slot)
            op(Verb.CACHE_READ, Lane.SSD_READ, (home,), (found[0],), **size)
        if plan.separate_device and not self._attends[seat]:
            found.append(_ON_DEVICE + slot)
            op(Verb.CACHE_IN, Lane.HOST_TO_DEVICE, (found[0] if len(found) > 1 else home,), (found[-1],), **size)
        self._brought[block, seat] = tuple(found)


def _piece(block: int, seat: int) -> int:
    return _HOME + block | seat + 1 << PIECE_SHIFT
