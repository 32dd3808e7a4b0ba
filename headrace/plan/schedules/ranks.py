"""What a rank does of a step where ranks share out every unit: the programs that it runs, and its share of a machine.

A rank reads, writes and updates 1/W of each unit. It gathers the rest of the weights, and sends the rest of a gradient to those
who hold it: (W - 1)/W of each. Ranks of one machine have one host copy of weights, and gather what other machines hold once.
What is a rank's own, such as inputs of its blocks, stays whole.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from headrace.terms.lanes import Lane
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.program import Program, Verb, Waiting

# Of these a rank has its own part alone.
_PARTS = frozenset(
    (
        Verb.FETCH,
        Verb.READ_STATES,
        Verb.STATES_TO_DEVICE,
        Verb.UPDATE,
        Verb.STATES_TO_HOST,
        Verb.WRITE_STATES,
        Verb.WRITE_WEIGHTS,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMachine(Ceilings):
    """What one of `ranks` has, which share out every unit; `sharers` of them are on one machine."""

    ranks: int
    sharers: int = 1

    @classmethod
    def of(cls, machine: Ceilings, ranks: int, sharers: int = 1) -> Self:
        """Return `machine`, as that of one of `ranks`."""
        return cls(**{each.name: getattr(machine, each.name) for each in fields(machine)}, ranks=ranks, sharers=sharers)


def ranks_on(machine: Ceilings) -> int:
    """Return how many ranks share out every unit; 1 where none do."""
    return machine.ranks if isinstance(machine, RankMachine) else 1


def sharers_on(machine: Ceilings) -> int:
    """Return how many ranks of one machine have one host copy; 1 where none do."""
    return machine.sharers if isinstance(machine, RankMachine) else 1


def of_rank(program: Program, ranks: int, sharers: int = 1) -> Program:
    """Return a program of `ranks` that share out every unit, `sharers` of them on one machine, with the bytes and operations of
    one of them.

    Both exchanges send as much as they receive. So they take turns on one lane, as if the link went one way.
    """
    if ranks == 1:
        return program
    found = []
    for op in program.ops:
        if op.verb in _PARTS or op.waiting is Waiting.GRADIENT:
            op = replace(op, bytes=-(-op.bytes // ranks), flops=op.flops / ranks)
        elif op.verb is Verb.GATHER:
            op = replace(op, bytes=op.bytes * (ranks - sharers) // (ranks * sharers))
        elif op.verb is Verb.SCATTER:
            op = replace(op, lane=Lane.NIC_DOWN, bytes=op.bytes * (ranks - 1) // ranks)
        found.append(op)
    return Program(tuple(found))


def share_of_machine(machine: Ceilings, ranks: int) -> Ceilings:
    """Return what each of so many equal processes has of a machine, if each has a device of its own."""
    drives = tuple(
        replace(
            drive,
            read_bytes_per_second=drive.read_bytes_per_second / ranks,
            write_bytes_per_second=drive.write_bytes_per_second / ranks,
            mixed_bytes_per_second=drive.mixed_bytes_per_second / ranks,
            rated_endurance_bytes=drive.rated_endurance_bytes and drive.rated_endurance_bytes / ranks,
        )
        for drive in machine.drives
    )
    compute = 1 if machine.has_device else ranks
    return replace(
        machine,
        cores=max(1, machine.cores // ranks),
        host_memory_bytes=machine.host_memory_bytes // ranks,
        host_memory_bytes_per_second=machine.host_memory_bytes_per_second / ranks,
        update_bytes_per_second=machine.update_bytes_per_second / ranks,
        flops_per_second={dtype: rate / compute for dtype, rate in machine.flops_per_second.items()},
        drives=drives,
    )
