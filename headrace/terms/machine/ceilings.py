"""What a machine can do at most: rates, capacities, overheads, and how much its parts slow one another.

`Ceilings` is a value that is measured (`headrace bench machine`), shipped with the package (`plan/machines`) or written by
hand. The planner and the simulated interpreter know nothing else of the hardware. The invariant: an instance holds only figures
that can be true. A missing, unknown or absurd figure is refused by its field's name: a planner fed a zero or a NaN would still
print a plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.figures import (
    amount,
    figure,
    mapping_of,
    names_of,
    optional_figure,
    rates_of,
    refuse_excess,
    refuse_unknown,
    slowdowns_of,
    texts_of,
    whole,
)
from headrace.terms.lanes import Hardware
from headrace.terms.layout import COMPUTE_DTYPES
from headrace.terms.machine.drives import MOST_BYTES, Drive, InFlight, drives_of, striped_shares

# The name of a machine without measurements.
NOMINAL = "nominal"
# The largest believable figures: a rack of the fastest hardware of 2026 stays below each; a figure in a wrong unit is above it.
_MOST_FLOPS_PER_SECOND = 1e17
_MOST_BYTES_PER_SECOND = 2e13
_MOST_CORES = 4096
_MOST_OVERHEAD_SECONDS = 10.0
_NETWORK_BYTES_PER_SECOND = 1.25e9  # 10 Gbit/s
# Keys and values of bfloat16 that a core goes through as it attends, four query heads to one of keys (docs/log/host-attention).
_ATTENDED_BYTES_PER_SECOND_PER_CORE = 2.4e9
# Below the data sheets of all GPUs with 4 GiB or more that were made since 2020 (192 GB/s: RTX 3050 laptop; from memory).
_LEAST_DEVICE_MEMORY_BYTES_PER_SECOND = 150e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """A machine profile. Make one with `from_json`, which checks the figures.

    `flops_per_second` maps a compute dtype (`bfloat16`, ...) to the sustained rate of large matrix products, counting two
    operations per multiply-add; attention's products, its softmax included, reach `attention_share` of it. The model's other
    work is counted in seconds. `hidden_seconds` is for each element of a micro-batch's hidden states, in a block's forward,
    recompute and backward together (norms, activations, sums). `logit_seconds` is for each logit. `head_seconds` is for each
    parameter of the head and chunk of the loss, because each chunk's gradient is added to the others'.
    `both_ways_bytes_per_second` is the total over the host-device link when both directions run at once.
    `update_bytes_per_second` counts all memory traffic of the update kernel (26 bytes per parameter with bfloat16) on all
    cores. `slowdowns[a][b]` is the share of its own rate that lane `a` keeps while lane `b` is busy (1 where absent).
    `fresh_pages_share` is the share of its matrix rate that a CPU keeps where freed memory goes back to the kernel at once.
    `device_memory_bytes_per_second` is the bandwidth of the device's own memory; None if it was not measured.
    `row_product_bytes_per_second` is how fast a CPU's product of one bfloat16 row goes through weights; None: as memory does.
    `attended_bytes_per_second` is how fast all cores go through keys and values in attention; None if it was not measured.
    `widened_dtypes` are those whose products a CPU computes in float32, because it has no instructions for them.
    `decoded_per_second` has weights that one core decodes in a second, by kind of code; `codec.table` has those of others.
    `has_device` is false where the CPU computes; the link's figures are then those of copies inside host memory. `sources` says
    of each figure where it comes from.
    """

    name: str
    has_device: bool
    device_memory_bytes: int
    host_memory_bytes: int
    cores: int
    flops_per_second: Mapping[str, float]
    host_to_device_bytes_per_second: float
    device_to_host_bytes_per_second: float
    both_ways_bytes_per_second: float
    host_memory_bytes_per_second: float
    update_bytes_per_second: float
    update_bytes_per_second_per_core: float
    drives: tuple[Drive, ...]
    device_memory_bytes_per_second: float | None = None
    row_product_bytes_per_second: float | None = None
    attended_bytes_per_second: float | None = None
    network_bytes_per_second: float = _NETWORK_BYTES_PER_SECOND  # each way
    fresh_pages_share: float = 1.0
    attention_share: float = 1.0
    hidden_seconds: float = 0.0
    logit_seconds: float = 0.0
    head_seconds: float = 0.0
    launch_seconds: float = 0.0  # added to each operation of the compute lane, but where calls of operators are counted
    operator_seconds: float = 0.0  # what Python and libraries take to begin one operator of a model's code
    turn_seconds: float = 0.0  # what transformers' loop takes between two passes, besides the head's product
    transfer_seconds: float = 0.0  # added to each copy, read and write
    commit_seconds: float = 0.0
    widened_dtypes: tuple[str, ...] = ()
    decoded_per_second: Mapping[str, float] = field(default_factory=dict)
    slowdowns: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def called(self) -> str:
        """What the machine is called in a sentence."""
        return self.name if self.name != NOMINAL else "a nominal machine (`headrace bench machine` measures this one)"

    @property
    def ssd_read_bytes_per_second(self) -> float:
        """Read rate of all drives together: the last of them to read its stripes decides."""
        return min(drive.read_bytes_per_second / share for drive, share in zip(self.drives, self._shares, strict=True))

    @property
    def ssd_write_bytes_per_second(self) -> float:
        """Write rate of all drives together: the last of them to write its stripes decides."""
        return min(drive.write_bytes_per_second / share for drive, share in zip(self.drives, self._shares, strict=True))

    @property
    def ssd_mixed_bytes_per_second(self) -> float:
        """Total rate of all drives while reads and writes run at once. Stripes are laid out by it, so all drives finish
        together.
        """
        return sum(drive.mixed_bytes_per_second for drive in self.drives)

    @property
    def _shares(self) -> tuple[float, ...]:
        return striped_shares(self.drives)

    def of_directories(self, file_systems: Sequence[int]) -> "Ceilings":
        """Return the profile of a run with these directories: directory i is drive i, further ones are like the last drive.

        `file_systems` gives for each directory the index of the first one on the same file system (`files.file_systems`):
        directories on one drive count as one drive.
        """
        drives = tuple(self.drives[min(index, len(self.drives) - 1)] for index in dict.fromkeys(file_systems))
        return replace(self, drives=drives)

    def in_flight(self, num_drives: int) -> InFlight:
        """Return how one I/O engine keeps the first `num_drives` busy; further ones are like the last.

        Threads add up, because a drive is only busy with pieces of its own under way. The piece is the largest that any of the
        drives asks for: each is measured to need that much, and none is slower with more. Where none of these drives has a
        setting, the engine's defaults are returned.
        """
        drives = [self.drives[min(index, len(self.drives) - 1)] for index in range(num_drives)]
        if not any(drive.is_tuned for drive in drives):
            return InFlight()
        settings = [drive.in_flight for drive in drives]
        return InFlight(
            threads=sum(setting.threads for setting in settings), piece_bytes=max(setting.piece_bytes for setting in settings)
        )

    @property
    def device_update_bytes_per_second(self) -> float:
        """Rate at which updates on the device read and write its memory; without a figure, that of the slowest GPUs in use."""
        return self.device_memory_bytes_per_second or _LEAST_DEVICE_MEMORY_BYTES_PER_SECOND

    @property
    def make_bytes_per_second(self) -> float:
        """Rate at which weights are made of what is stored and trained: the memory bandwidth of the device that computes."""
        return self.device_update_bytes_per_second if self.has_device else self.host_memory_bytes_per_second

    @property
    def attention_bytes_per_second(self) -> float:
        """Rate at which the host attends; without a figure, that of an ordinary server's cores, within what updates attain."""
        assumed = min(self.cores * _ATTENDED_BYTES_PER_SECOND_PER_CORE, self.update_bytes_per_second)
        return self.attended_bytes_per_second or assumed

    def with_twice(self, part: Hardware) -> "Ceilings":
        """Return the machine with `part` doubled; a missing figure becomes twice what is assumed for it."""
        memory, attended = self.device_update_bytes_per_second, self.attention_bytes_per_second
        known = replace(self, device_memory_bytes_per_second=memory, attended_bytes_per_second=attended)
        return replace(self, **{name: _twice(getattr(known, name)) for name in part.figures})

    def matrix_flops_per_second(self, compute_dtype: str) -> float:
        """Return the sustained matrix rate for `compute_dtype`.

        Raises:
            ConfigError: the profile has no figure for it.
        """
        if compute_dtype not in self.flops_per_second:
            known = ", ".join(sorted(self.flops_per_second))
            raise ConfigError(
                f"{self.name}: flops_per_second has no figure for {compute_dtype!r}, only for {known}; "
                "add it to the profile or choose another compute dtype"
            )
        return self.flops_per_second[compute_dtype]

    @classmethod
    def from_json(cls, values: object) -> "Ceilings":
        """Return the ceilings that `values` (a parsed JSON object, as `to_json` makes) describe.

        Raises: ConfigError: a figure is missing, unknown, not a number, not positive, or beyond what hardware can do. The
            message names the field and shows the value.
        """
        figures = mapping_of(values, where="machine profile")
        name = figures.get("name")
        if not isinstance(name, str) or not name:
            raise ConfigError(f"machine profile: name is {name!r}; write a text that names the machine")
        refuse_unknown(figures, {each.name for each in fields(cls)}, where=name)
        has_device = figures.get("has_device")
        if not isinstance(has_device, bool):
            raise ConfigError(f"{name}: has_device is {has_device!r}; write true (a GPU) or false (the CPU computes)")
        rates = {rate: figure(figures, rate, where=name, most=_MOST_BYTES_PER_SECOND) for rate in _RATES}
        refuse_excess(rates, _LINK[2], _LINK[:2], where=name)
        refuse_excess(rates, "update_bytes_per_second_per_core", ("update_bytes_per_second",), where=name)
        refuse_excess(rates, "update_bytes_per_second", ("host_memory_bytes_per_second",), where=name)
        maybe: Any = {each: optional_figure(figures, each, where=name, most=_MOST_BYTES_PER_SECOND) for each in _MAYBE_RATES}
        return cls(
            name=name,
            has_device=has_device,
            device_memory_bytes=_device_memory(figures, has_device=has_device, where=name),
            **maybe,
            network_bytes_per_second=_network(figures, where=name),
            **{share: figure({share: 1.0, **figures}, share, where=name, most=1.0) for share in _SHARES},
            host_memory_bytes=whole(figures, "host_memory_bytes", where=name, most=MOST_BYTES),
            cores=whole(figures, "cores", where=name, most=_MOST_CORES),
            flops_per_second=_flops(figures, where=name),
            drives=drives_of(figures, where=name),
            widened_dtypes=names_of(figures, "widened_dtypes", COMPUTE_DTYPES, where=name),
            decoded_per_second=rates_of(figures, "decoded_per_second", None, where=name, most=_MOST_FLOPS_PER_SECOND),
            slowdowns=slowdowns_of(figures, where=name),
            sources=texts_of(figures, "sources", where=name),
            **rates,
            **{
                overhead: amount(figures, overhead, where=name, most=_MOST_OVERHEAD_SECONDS, unit=" seconds")
                for overhead in _OVERHEADS
            },
        )

    def to_json(self) -> dict[str, Any]:
        """Return the ceilings as plain JSON values; `from_json` gives an equal instance back."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        values["flops_per_second"] = dict(self.flops_per_second)
        values["drives"] = [drive.to_json() for drive in self.drives]
        values["widened_dtypes"] = list(self.widened_dtypes)
        values["decoded_per_second"] = dict(self.decoded_per_second)
        values["slowdowns"] = {lane: dict(factors) for lane, factors in self.slowdowns.items()}
        values["sources"] = dict(self.sources)
        return values


_LINK = ("host_to_device_bytes_per_second", "device_to_host_bytes_per_second", "both_ways_bytes_per_second")
_RATES = (
    *_LINK,
    "host_memory_bytes_per_second",
    "update_bytes_per_second",
    "update_bytes_per_second_per_core",
)
_SHARES = ("attention_share", "fresh_pages_share")
_MAYBE_RATES = ("device_memory_bytes_per_second", "row_product_bytes_per_second", "attended_bytes_per_second")
_OVERHEADS = (
    "hidden_seconds",
    "logit_seconds",
    "head_seconds",
    "launch_seconds",
    "operator_seconds",
    "turn_seconds",
    "transfer_seconds",
    "commit_seconds",
)


def _device_memory(figures: Mapping[str, Any], *, has_device: bool, where: str) -> int:
    if has_device:
        return whole(figures, "device_memory_bytes", where=where, most=MOST_BYTES)
    value = figures.get("device_memory_bytes", 0)
    if isinstance(value, bool) or value != 0:
        raise ConfigError(f"{where}: device_memory_bytes is {value!r} but has_device is false; write 0, or has_device true")
    return 0


def _twice(figure: Any) -> Any:
    """Return twice a figure: a rate, rates by name, or drives."""
    return {name: 2 * rate for name, rate in figure.items()} if isinstance(figure, Mapping) else 2 * figure


def _network(figures: Mapping[str, Any], *, where: str) -> float:
    """Return the network's rate in bytes per second; a profile without one has 10 Gbit/s."""
    name = "network_bytes_per_second"
    return figure({name: _NETWORK_BYTES_PER_SECOND, **figures}, name, where=where, most=_MOST_BYTES_PER_SECOND)


def _flops(figures: Mapping[str, Any], *, where: str) -> dict[str, float]:
    given = {"flops_per_second": None, **figures}
    rates = rates_of(given, "flops_per_second", COMPUTE_DTYPES, where=where, most=_MOST_FLOPS_PER_SECOND)
    if not rates:
        raise ConfigError(f"{where}: flops_per_second is empty; give a figure for one of {', '.join(COMPUTE_DTYPES)} at least")
    return rates
