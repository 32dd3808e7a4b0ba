"""What a machine may give: this one, or one that a profile describes.

Invariant: without a given budget, a share of what is free now, as the engine takes it (`default_bytes`, `machine.limits`).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from headrace.machine.cpu import CpuMachine
from headrace.machine.cuda import GPU_OVERHEAD_BYTES
from headrace.machine.host_memory import anonymous_bytes
from headrace.machine.limits import machine_memory_bytes
from headrace.machine.limits import usual_host_bytes as host_bytes_here
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.parts.banks import find_experts
from headrace.plan.value.allowance import Allowance, planned_runtime_bytes
from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import Budget, default_bytes
from headrace.terms.sizes import MIB, format_bytes

# Bytes of host memory for the interpreter and libraries in a run that tokenises its data and compiles its kernels itself.
# Measured were 339 MiB, and 303 with both cached (docs/log/process-memory). A build of torch for CUDA takes 140 MiB more.
_RUNTIME_BYTES, _CUDA_BUILD_BYTES = 352 * MIB, 140 * MIB
# For another machine the interpreter and libraries are taken to need what was measured here, not what this process has now.
RUNTIME_ELSEWHERE_BYTES = 300 * MIB
# For a mixture whose products oneDNN compiles: 16 of them (`process`), as measured beyond the plan on a CPU that multiplies
# bfloat16.
KEPT_PRODUCTS_BYTES = 200 * MIB
# Variants are offered at most this share of a machine's memory: the rest is the system's, and a card is never empty.
_OFFERED_PERCENT = 90


def runtime_bytes(measured: int) -> int:
    """Return the bytes to plan for the interpreter and its libraries: a figure that covers every run, or `measured` if the
    program has already loaded more.
    """
    stated = _RUNTIME_BYTES + (_CUDA_BUILD_BYTES if torch.version.cuda else 0)
    return max(stated, planned_runtime_bytes(measured))


def runtime_here() -> int:
    """Return `runtime_bytes` for what this process has now."""
    return runtime_bytes(anonymous_bytes())


def kept_products_bytes(chain: Chain, compute_dtype: str, *, on_device: bool, narrow: bool) -> int:
    """Return the bytes that oneDNN keeps of a `chain`'s products, beyond the interpreter's: of a mixture, where the CPU
    computes and has `narrow` products.
    """
    if on_device or not narrow or compute_dtype == "float32" or not any(find_experts(chain.model, chain.runner.blocks)):
        return 0
    return KEPT_PRODUCTS_BYTES


def default_host_bytes(ceilings: Ceilings | None, *, here: bool) -> int:
    """Return 70 % of the bytes of memory that are available here (`machine.limits`), or that the profile has."""
    if not here and ceilings is not None:
        return default_bytes("host", ceilings.host_memory_bytes)
    return host_bytes_here(pins=torch.cuda.is_available())


def default_device_bytes(ceilings: Ceilings | None, *, here: bool) -> int | None:
    """Return 90 % of the bytes of device memory that are free here, or that the profile has; None without a device."""
    if here and torch.cuda.is_available():
        return default_bytes("device", torch.cuda.mem_get_info()[0])
    if ceilings is None or not ceilings.has_device:
        return None
    return default_bytes("device", ceilings.device_memory_bytes)


def default_device_overhead_bytes(ceilings: Ceilings | None, *, here: bool) -> int:
    """Return the bytes of a GPU that libraries and the allocator take besides tensors; 0 where the CPU computes."""
    gpu = (here and torch.cuda.is_available()) or (ceilings is not None and ceilings.has_device)
    return GPU_OVERHEAD_BYTES if gpu else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlace:
    """Where a run would be: what it may use by default, and what there is at all (`most_bytes`, by tier, if known)."""

    name: str
    host_bytes: int
    device_bytes: int | None
    device_overhead_bytes: int
    runtime_bytes: int
    cores: int
    most_bytes: dict[str, int]
    has_drives: bool = False  # of a machine elsewhere, whose directories are unknown here

    @classmethod
    def here(cls, machine: Machine, runtime_bytes: int, cores: int) -> "RunPlace":
        """Return this machine, which computes on `machine`, in a process whose libraries take `runtime_bytes`."""
        separate = machine.separate_device
        return cls(
            name="this machine",
            host_bytes=host_bytes_here(pins=machine.device.type == "cuda"),
            device_bytes=default_bytes("device", machine.device_memory_bytes()[0]) if separate else None,
            device_overhead_bytes=machine.device_overhead_bytes,
            runtime_bytes=runtime_bytes,
            cores=cores,
            most_bytes={"host": machine_memory_bytes()},
        )

    @classmethod
    def of(cls, ceilings: Ceilings | None, *, here: bool) -> "RunPlace":
        """Return this machine, or the one with these ceilings."""
        this = here or ceilings is None
        most = {"host": machine_memory_bytes()} if ceilings is None or here else {"host": ceilings.host_memory_bytes}
        if ceilings is not None and ceilings.has_device:
            most["device"] = ceilings.device_memory_bytes
        return cls(
            name="this machine" if ceilings is None else ceilings.name,
            host_bytes=default_host_bytes(ceilings, here=here),
            device_bytes=default_device_bytes(ceilings, here=here),
            device_overhead_bytes=default_device_overhead_bytes(ceilings, here=here),
            runtime_bytes=runtime_here() if this else RUNTIME_ELSEWHERE_BYTES,
            cores=torch.get_num_threads() if ceilings is None or here else ceilings.cores,
            most_bytes=most,
            has_drives=not here and ceilings is not None and bool(ceilings.drives),
        )

    def keeping(self, chain: Chain, *, narrow: bool) -> "RunPlace":
        """Return the same place, with `kept_products_bytes` of a `chain` among what libraries take."""
        on_device = bool(self.device_overhead_bytes)
        kept = kept_products_bytes(chain, chain.compute_dtype, on_device=on_device, narrow=narrow)
        return replace(self, runtime_bytes=self.runtime_bytes + kept)

    def with_twice_host(self) -> "RunPlace":
        """Return the same place with twice the host memory."""
        most = {tier: num_bytes * (1 + (tier == "host")) for tier, num_bytes in self.most_bytes.items()}
        return replace(self, host_bytes=2 * self.host_bytes, most_bytes=most)

    def allowance(self, budget: Budget, *, ssd_bytes: int | None, import_workspace_bytes: int | None, **more: Any) -> Allowance:
        """Return what a run may use on this machine; `more` are other fields of `Allowance`.

        Raises:
            ConfigError: a budget is larger than the tier.
        """
        for tier, given in (("host", budget.host_bytes), ("device", budget.device_bytes)):
            most = self.most_bytes.get(tier)
            if given is not None and most is not None and given > most:
                raise ConfigError(
                    f"{tier} memory: {format_bytes(given)} given, {self.name} has {format_bytes(most)}; give less, or leave "
                    f"{tier}_memory out"
                )
        return Allowance(
            host_bytes=self.host_bytes if budget.host_bytes is None else budget.host_bytes,
            device_bytes=self.device_bytes if budget.device_bytes is None else budget.device_bytes,
            runtime_bytes=self.runtime_bytes,
            cores=self.cores,
            device_overhead_bytes=self.device_overhead_bytes,
            import_workspace_bytes=import_workspace_bytes,
            ssd_bytes=ssd_bytes,
            **more,
        )

    @property
    def offered_bytes(self) -> dict[str, int]:
        """The most bytes that a variant may ask for, by tier."""
        return {tier: most * _OFFERED_PERCENT // 100 for tier, most in self.most_bytes.items()}


def multiplies(compute_dtype: str, ceilings: Ceilings | None, *, here: bool) -> bool:
    """Return whether the CPU that computes has instructions for products of `compute_dtype`: this one's, or the profile's."""
    if here or ceilings is None:
        return CpuMachine().multiplies(compute_dtype)
    return compute_dtype not in ceilings.widened_dtypes
