"""One step as a program: operations with lanes, dependencies and buffers (docs/decisions/0001).

The planner emits it; three interpreters run it: overlapped (threads and streams), plain (in order), simulated (virtual clock).
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from headrace.terms.lanes import Lane


class Verb(StrEnum):
    """What an operation does. `flow/` has one handler for each."""

    PROLOGUE = "prologue"  # micro-batch -> first hidden states
    FETCH = "fetch"  # unit's weights: ssd -> host slot
    PULL = "pull"  # unit's weights: another site -> host slot
    UPLOAD = "upload"  # unit's weights: host slot -> device slot
    MAKE = "make"  # unit's weights: what is stored, and what is trained besides -> the slot that compute reads
    FORWARD = "forward"  # block, one micro-batch; where experts come by themselves, a few of them for all micro-batches
    ENTER = "enter"  # block up to its experts, one micro-batch: forward; there it waits
    VISIT = "visit"  # a few experts of a block, for all micro-batches that wait there: forward
    REVISIT = "revisit"  # the same, backward
    ROUTE = "route"  # what tokens have chosen -> which experts are needed
    OUT = "out"  # what waits until it is read again (`Waiting`), down a tier: device -> host, or host -> ssd, by its lane
    IN = "in"  # and back up
    EPILOGUE = "epilogue"  # norm, head, loss and their gradients, one micro-batch
    LOG_PROBS = "log-probs"  # norm, head, and the log-probability of each label; after the last micro-batch, the loss
    SCORE = "score"  # norm, head, and the loss where there are labels, one micro-batch: without gradients
    CACHE_READ = "cache-read"  # a seat's keys and values of a block: ssd -> host
    CACHE_IN = "cache-in"  # the same: host -> device
    CACHE_OUT = "cache-out"  # those of its new tokens: device -> host
    CACHE_WRITE = "cache-write"  # pages of them that are full: host -> ssd
    RECOMPUTE = "recompute"  # block up to its cache, one micro-batch of a prompt; or with a graph, except for its experts
    QUERY = "query"  # block up to its attention, one micro-batch of new tokens that the host attends for
    QUERY_OUT = "query-out"  # their queries, keys and values: device -> host
    ATTEND = "attend"  # attention where a seat's keys and values lie, in host memory
    RESULT_IN = "result-in"  # what it makes: host -> device
    TURN = "turn"  # a seat's own code between two passes: head, sampling, stopping, embedding, masks
    BACKWARD = "backward"  # block, one micro-batch: recompute (or replay) and gradients
    PROLOGUE_BACKWARD = "prologue-backward"
    DRAIN = "drain"  # unit's gradient: device -> host, to 16 bits
    PUSH = "push"  # unit's drained gradient: host -> another site
    DECIDE = "decide"  # gradient norm -> clip factor, or skip
    READ_STATES = "read-states"  # a chunk's states: ssd -> staging
    STATES_TO_DEVICE = "states-to-device"  # a chunk's states, weights and gradient: host -> device staging
    UPDATE = "update"  # a chunk: one pass of the rule over planes and gradient
    STATES_TO_HOST = "states-to-host"  # a chunk's new states and weights: device staging -> where they came from
    WRITE_STATES = "write-states"  # a chunk's new states: staging -> ssd, other slot
    WRITE_WEIGHTS = "write-weights"  # a chunk's new weights: host slot -> ssd, other slot
    COMMIT = "commit"  # everything durable, then the record
    GATHER = "gather"  # unit's weights: other ranks that hold parts of it -> where this rank's part is
    SCATTER = "scatter"  # unit's drained gradient: to those ranks that hold parts of it; the sum of this rank's part -> host
    CATCH = "catch"  # block, some micro-batches: inputs of its matrices are added up, or only which of them multiply is seen
    ROUND = "round"  # some of a block's matrices: sums of inputs -> values on the grid of a code
    KEEP = "keep"  # what was rounded: encoded; or a block's codes: host -> file
    ANNOUNCE = "announce"  # a step: its rows and what decides its numbers -> workers
    SEND = "send"  # unit's weights: host slot -> workers, who pull it
    RECEIVE = "receive"  # unit's gradient: workers, who push it -> host
    GIVE = "give"  # what the head adds to the gradient of a tied matrix: the last stage -> the first
    TAKE = "take"  # the same, where it arrives
    REPORT = "report"  # what workers have to say of a step: workers -> here


class Waiting(StrEnum):
    """What `OUT` and `IN` move."""

    INPUT = "input"  # a block's input, and what is kept beside it, until backward
    HIDDEN = "hidden"  # hidden states between two units
    HIDDEN_GRADIENT = "hidden-gradient"  # and their gradients
    GRADIENT = "gradient"  # a unit's drained gradient, until the norm is known
    SUM = "sum"  # a unit's gradient, or its experts', so far: fp32, until the next micro-batches


class Pool(IntEnum):
    """Where buffers lie that operations read and write. A buffer is an integer: its pool and its slot there (`buffer`).

    What is `PASSING` lives within one program: compute, one operation after the other, orders its uses in two programs.
    """

    HOST_WEIGHTS = 0  # a block's weights in host memory
    DEVICE_WEIGHTS = 1  # and on the device
    RESIDENT_WEIGHTS = 2  # by unit: weights that stay where compute reads them
    STAGING = 3  # the host copy through which resident weights reach a separate device
    STATES = 4  # a chunk's states in host memory
    RESIDENT_STATES = 5  # by unit: states that stay in host memory
    DEVICE_STATES = 6  # all planes and the gradient of a chunk that is updated on the device
    GRADIENT = 7  # a unit's drained gradient
    ACCUMULATOR = 8  # a block's gradient, where backward sums it
    RESIDENT_ACCUMULATOR = 9  # that of the resident units
    STASH = 10  # one block input on its way to or from the SSD
    SSD_WEIGHTS = 11  # by unit: its newest weights
    SSD_STATES = 12  # by unit: its newest states
    HELD = 13  # by unit: its gradient on the SSD, until the norm is known
    FREE_SLOTS = 14  # on the SSD, where a step may write: those that the last commit made free
    VERDICT = 15  # a step's: clip factor, or skip
    TRAINED = 16  # by unit: the weights of a trained family of its own, in host memory
    SSD_TRAINED = 17  # and on the SSD
    SOURCES = 18  # what weights are made of, on its way to the device
    FAR = 19  # by unit: its newest weights at another site
    CACHE = 20  # by block: keys and values of all seats, where they live; in pieces of one seat each
    CACHE_HOST = 21  # a seat's keys and values of a block, on their way in host memory
    CACHE_DEVICE = 22  # and on the device
    HIDDEN = 23  # hidden states between two blocks, in a file; in pieces of some micro-batches each
    ROUNDED = 24  # a block's weights with the values of their codes
    CODES = 25  # numbers that were rounded and not encoded yet
    KEPT = 26  # a block's codes in host memory, until its file is written
    PASSED = 27  # hidden states that a block made, on their way to that file
    PARKED = 28  # by unit: its gradient so far, in host memory
    PARKING = 29  # that of a unit on its way to or from the SSD
    SSD_PARKED = 30  # by unit: and there
    NORM = 31  # PASSING, from here on; in pieces of one unit each
    LEFT = 32  # by block and micro-batch: what forward leaves for backward, as compute made it
    HOST_STASH = 33  # and in host memory
    SSD_STASH = 34  # and on the SSD
    RECALLED = 35  # and back on the device
    CHOICES = 36  # the experts that tokens of a block were sent to
    ROUTED = 37  # and so which of them are fetched
    EXPERTS = 38  # a few experts of a block in host memory
    DEVICE_EXPERTS = 39  # and where compute reads them
    EXPERT_SOURCES = 40  # what these are made of, on the device
    CARRIED = 41  # by micro-batch: queries on the device, and what attention made of them on the host
    HOST_CARRIED = 42  # and in host memory
    EXPERT_SUMS = 43  # the gradients of a few experts of a block, where backward sums them
    BETWEEN = 44  # by micro-batch: hidden states between two units, or their gradients, in host memory
    COMING = 45  # and on the device, where compute reads them
    GOING = 46  # and where compute made them


PASSING = Pool.NORM
_SLOT_BITS = 22
SLOT_MASK = (1 << _SLOT_BITS) - 1
# A piece of a buffer, such as one chunk of a block's weights. It is numbered from 1, above the buffer's own bits; 0 is all of
# it.
PIECE_SHIFT = 32
WHOLE_MASK = (1 << PIECE_SHIFT) - 1


def buffer(pool: Pool, slot: int = 0) -> int:
    """Return the buffer in `slot` of `pool`; plus `piece << PIECE_SHIFT` it is one piece of it."""
    return pool << _SLOT_BITS | slot


# Not frozen, though never changed: a frozen one takes three times as long to make, and a search makes 200,000.
@dataclass(slots=True)
class Op:
    """One operation. `after` and `after_previous` are indices of operations of this and of the previous program.

    `waiting` is what `OUT` and `IN` move. `part` is a piece of the unit that streams alone, -1 for all of it. `late`: it
    belongs to the step before (an update that was held, or that step's commit). `bytes` is what crosses the lane; `flops` what
    compute does, by `calls` of a model's operators where these are counted. `linked` are bytes that compute itself brings to
    the device, over the link, and `leaving` those that it takes away.
    `buffers` are those that it touches, as integers; which of them it reads and which it writes, the ledger knows
    (plan/schedules/ledger.py).
    """

    index: int
    verb: Verb
    lane: Lane
    unit: int = -1
    part: int = -1
    micro: int = -1
    chunk: int = -1
    bytes: int = 0
    flops: float = 0.0
    late: bool = False
    buffers: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()
    calls: int = 0
    linked: int = 0
    leaving: int = 0
    waiting: Waiting | None = None

    def slot(self, pool: Pool) -> int:
        """Return the slot of `pool` that the operation uses, -1 if it uses none."""
        return next((buffer & SLOT_MASK for buffer in self.buffers if buffer >> _SLOT_BITS == pool), -1)

    @property
    def is_on_device(self) -> bool:
        """Whether an update is done on the device, on planes that were brought there."""
        return self.lane is Lane.DEVICE_UPDATE

    @property
    def act(self) -> str:
        """The verb, with what it moves, such as `input-out`: one word for traces."""
        return self.verb if self.waiting is None else f"{self.waiting}-{self.verb}"

    @property
    def label(self) -> str:
        """A short name for traces and errors, such as `update unit 3 chunk 0`."""
        return label_of(self.act, unit=self.unit, part=self.part, micro=self.micro, chunk=self.chunk)


def label_of(verb: str, **places: int) -> str:
    """Return the short name of an operation at these places, of which negative ones are none."""
    return " ".join([str(verb), *(f"{word} {value}" for word, value in places.items() if value >= 0)])


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in an order in which one thread may run them; every lane runs its own in this order."""

    ops: tuple[Op, ...]

    def lane(self, lane: Lane) -> tuple[Op, ...]:
        """Return the operations of one lane, in order."""
        return tuple(op for op in self.ops if op.lane is lane)
