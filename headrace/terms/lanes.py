"""The lanes: a machine's resources, each with its name, rate and overhead, and what it shares with others.

To add a lane, add a row to `Lane`.
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class LaneShare:
    """Something that lanes share. `rate` names the figure of a profile (`Ceilings`) that says how fast they are together.

    Without a figure, lanes do no more together than one after the other. Each keeps half of its speed beside another, unless a
    profile's `slowdowns` say otherwise.
    """

    name: str
    rate: str | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """What people buy to make lanes faster: `twice` says twice of it in words, `figures` are the fields of a profile it
    doubles.
    """

    name: str
    twice: str
    figures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """What is known of a lane. `heading` names it on a page, `words` within a sentence.

    `rate` and `overhead` name figures of a profile: bytes per second, and seconds that each operation takes besides. `on_bus`:
    what it moves crosses the host's memory bus. `part`: what would make it faster. `stream` is the priority of the lane's own
    stream on a device that has streams, None where its work is the host's. `threads` is how many it has; with one, the end
    of an operation means that all before it have ended.
    """

    heading: str
    words: str
    rate: str | None = None
    overhead: str | None = None
    shares: LaneShare | None = None
    part: Hardware | None = None
    on_bus: bool = False
    stream: int | None = None
    threads: int = 1


_DEVICE = LaneShare("device")
_DRIVES = LaneShare("drives", "ssd_mixed_bytes_per_second")
_LINK = LaneShare("link", "both_ways_bytes_per_second")
_COMPUTE_PART = Hardware("compute", "compute twice as fast", ("flops_per_second", "device_memory_bytes_per_second"))
_DRIVES_PART = Hardware("SSDs", "twice as many SSDs", ("drives",))
_LINK_PART = Hardware(
    "host-device link",
    "a host-device link twice as fast",
    ("host_to_device_bytes_per_second", "device_to_host_bytes_per_second", "both_ways_bytes_per_second"),
)
_HOST_PART = Hardware(
    "CPU cores and host memory bandwidth",
    "CPU cores and host memory twice as fast",
    (
        "update_bytes_per_second",
        "update_bytes_per_second_per_core",
        "host_memory_bytes_per_second",
        "attended_bytes_per_second",
    ),
)
_NETWORK_PART = Hardware("network", "a network twice as fast", ("network_bytes_per_second",))


class Lane(StrEnum):
    """A resource that works through its operations in program order. This is the table of lanes: to add one, add a row."""

    row: LaneRow

    def __new__(cls, name: str, row: LaneRow) -> "Lane":
        """Make the lane `name`."""
        lane = str.__new__(cls, name)
        lane._value_, lane.row = name, row
        return lane

    COMPUTE = (
        "compute",
        LaneRow(heading="Compute", words="compute", overhead="launch_seconds", shares=_DEVICE, part=_COMPUTE_PART, stream=0),
    )
    SSD_READ = (
        "ssd-read",
        LaneRow(
            heading="SSD reads",
            words="SSD reads",
            rate="ssd_read_bytes_per_second",
            overhead="transfer_seconds",
            shares=_DRIVES,
            part=_DRIVES_PART,
            on_bus=True,
            threads=2,
        ),
    )
    SSD_WRITE = (
        "ssd-write",
        LaneRow(
            heading="SSD writes",
            words="SSD writes",
            rate="ssd_write_bytes_per_second",
            overhead="transfer_seconds",
            shares=_DRIVES,
            part=_DRIVES_PART,
            on_bus=True,
            threads=3,
        ),
    )
    # Copies get priority over compute: a copy that waits makes compute wait later.
    HOST_TO_DEVICE = (
        "host-to-device",
        LaneRow(
            heading="Host → device",
            words="host-to-device copies",
            rate="host_to_device_bytes_per_second",
            overhead="transfer_seconds",
            shares=_LINK,
            part=_LINK_PART,
            on_bus=True,
            stream=-1,
        ),
    )
    DEVICE_TO_HOST = (
        "device-to-host",
        LaneRow(
            heading="Device → host",
            words="device-to-host copies",
            rate="device_to_host_bytes_per_second",
            overhead="transfer_seconds",
            shares=_LINK,
            part=_LINK_PART,
            on_bus=True,
            stream=-1,
        ),
    )
    UPDATE = (
        "update",
        LaneRow(
            heading="Update", words="the CPU's update kernel", rate="update_bytes_per_second", part=_HOST_PART, on_bus=True
        ),
    )
    DEVICE_UPDATE = (
        "device-update",
        LaneRow(
            heading="Update on device",
            words="updates on the device",
            rate="device_update_bytes_per_second",
            overhead="launch_seconds",
            shares=_DEVICE,
            part=_COMPUTE_PART,
            stream=0,
        ),
    )
    MAKE = (
        "make",
        LaneRow(
            heading="Make weights",
            words="making weights",
            rate="make_bytes_per_second",
            overhead="launch_seconds",
            shares=_DEVICE,
            part=_COMPUTE_PART,
            stream=0,
        ),
    )
    ATTENTION = (
        "attention",
        LaneRow(
            heading="Attention on the host",
            words="attention on the host",
            rate="attention_bytes_per_second",
            overhead="transfer_seconds",
            part=_HOST_PART,
            on_bus=True,
        ),
    )
    # Until tokens have chosen their experts it is unknown which to read.
    ROUTER = "router", LaneRow(heading="Routers", words="waiting for routers", overhead="transfer_seconds")
    NIC_DOWN = (
        "nic-down",
        LaneRow(
            heading="Network in",
            words="what comes by the network",
            rate="network_bytes_per_second",
            part=_NETWORK_PART,
            on_bus=True,
        ),
    )
    NIC_UP = (
        "nic-up",
        LaneRow(
            heading="Network out",
            words="what goes by the network",
            rate="network_bytes_per_second",
            part=_NETWORK_PART,
            on_bus=True,
        ),
    )
    COMMIT = "commit", LaneRow(heading="Commit", words="commits", overhead="commit_seconds")


def sharing_lanes() -> dict[LaneShare, tuple[Lane, ...]]:
    """Return the lanes of each thing that lanes share, in the table's order."""
    things = dict.fromkeys(lane.row.shares for lane in Lane)
    return {thing: tuple(lane for lane in Lane if lane.row.shares == thing) for thing in things if thing is not None}


def words_of_lane(lane: Lane, *, has_device: bool) -> str:
    """Return what a lane is called in a sentence about a machine; without a device there is no link to one."""
    return lane.row.words if has_device or lane.row.part is not _LINK_PART else "copies in host memory"


def sharing_words(share: LaneShare, lanes: tuple[Lane, ...], *, has_device: bool = True) -> str:
    """Return what `lanes`, which share something, are called together within a sentence."""
    if not has_device:
        return words_of_lane(lanes[0], has_device=False)
    directions = [lanes[0].row.words, *(lane.row.words.split()[-1] for lane in lanes[1:])]
    return f"{' and '.join(directions)}, which share the {share.name}"


class Peer(StrEnum):
    """What another process of a run is, whose lanes are told of here: to a node, to rank 0, or to stage 0."""

    WORKER = "worker"
    RANK = "rank"
    STAGE = "stage"


def lane_of_peer(peer: Peer, number: int, lane: str) -> str:
    """Return what a lane of another process is called here; `number` is its rank, or that of its stage."""
    return f"{peer} {number}: {lane}"


def split_lane(name: str) -> tuple[Peer | None, int, str]:
    """Return whose lane has that name, by kind and number, and its name there. One of this process has no peer, and 0."""
    who, _, lane = name.partition(": ")
    for peer in Peer:
        number = who.removeprefix(f"{peer} ")
        if lane and number != who and number.isdecimal():
            return peer, int(number), lane
    return None, 0, name


def lane_named(name: str) -> Lane | None:
    """Return the lane `name`, None if the table has none: what a program of another version wrote may name others."""
    return next((lane for lane in Lane if lane == name), None)
