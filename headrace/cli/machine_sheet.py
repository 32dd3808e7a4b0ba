"""`headrace doctor`: what this machine is and can do, as plain values and as text.

Invariant: every fact is read from the system; one that cannot be read is null, never guessed. GPUs are seen through torch.
"""

import dataclasses
import os
import platform
import resource
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import headrace
from headrace.machine.control_groups import quota_cores, text_of
from headrace.terms.errors import ConfigError, PeerLost
from headrace.terms.sizes import format_bytes
from headrace.terms.tables import figures

_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")


def machine_sheet(ssd: tuple[Path, ...], *, measure: bool, link: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return all facts as JSON values. Sizes are in bytes, speeds in bytes per second. Measuring takes seconds per directory.

    `link` is what was measured about the link to a node; None if none was named.
    """
    return {
        "versions": _versions(),
        "system": {
            "platform": platform.platform(),
            "wsl": "microsoft" in platform.release().lower(),
            "container": any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")),
        },
        "cpu": _cpu(),
        "memory": _memory(),
        "gpus": _gpus(),
        "ssd": [_directory(path, measure) for path in ssd],
        "node": link,
    }


def link_to(node: str, secret: Path | None) -> dict[str, Any]:
    """Return the measured figures of the link to the node at `node`, HOST:PORT.

    Raises:
        ConfigError: the text is no address, or the node refuses.
        PeerLost: the node went away.
    """
    from headrace.peers import Address, Member, read_secret

    address = Address.of(node, key="node")
    try:
        member = Member(address, name="doctor", version=headrace.__version__, secret=read_secret(secret), visits=True)
    except PeerLost as error:
        raise ConfigError(f"{error}; start it there: headrace node RUN.YAML --listen {address}") from error
    try:
        return {"address": str(address), **dataclasses.asdict(member.measure())}
    finally:
        member.close()


def sheet_text(sheet: dict[str, Any]) -> str:
    """Return the facts as lines for people."""
    return "\n".join(_lines(sheet))


def _lines(sheet: dict[str, Any]) -> Iterator[str]:
    yield "versions  " + ", ".join(f"{name} {number or 'missing'}" for name, number in sheet["versions"].items())
    system, cpu, memory = sheet["system"], sheet["cpu"], sheet["memory"]
    marks = [word for word in ("wsl", "container") if system[word]]
    yield f"system    {system['platform']}" + (f" ({', '.join(marks)})" if marks else "")
    limit = f", limited to {cpu['cgroup_cores']:g} by the control group" if cpu["cgroup_cores"] else ""
    yield f"cpu       {cpu['model'] or 'unknown'}, {cpu['usable_cores']} of {cpu['cores']} cores usable{limit}"
    yield f"flags     {' '.join(cpu['flags']) or 'none of those that matter'}"
    free = f"{_size(memory['available_bytes'])} available, {_size(memory['allowed_bytes'])} of it to this process"
    yield f"memory    {_size(memory['total_bytes'])} total, {free}"
    group, locked = _size(memory["cgroup_limit_bytes"], "none"), _size(memory["locked_limit_bytes"], "unlimited")
    yield f"limits    control group {group}, locked memory {locked}, huge pages {memory['transparent_huge_pages'] or 'unknown'}"
    if memory["pinnable_bytes"] is not None:
        yield f"          WSL: no more than {_size(memory['pinnable_bytes'])} can be pinned for a GPU"
    for gpu in sheet["gpus"]:
        free = f"{_size(gpu['free_bytes'])} of {_size(gpu['total_bytes'])} free"
        yield f"gpu       {gpu['name']}, {free}, compute capability {gpu['compute_capability']}"
    if not sheet["gpus"]:
        yield "gpu       none that torch can use: the CPU is the device"
    for facts in sheet["ssd"]:
        yield from _directory_lines(facts)
    if not sheet["ssd"]:
        yield "ssd       none named; --ssd DIR describes and measures a directory"
    if link := sheet["node"]:
        up, down = (link[f"{way}_bytes_per_second"] for way in ("up", "down"))
        trip = f"round trip {1e3 * link['round_trip_seconds']:.2f} ms"
        yield f"link      {link['address']}: to the node {_rate(up)}, from it {_rate(down)}, {trip}"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e6:.0f} MB/s ({8 * bytes_per_second / 1e9:.3g} Gbit/s)"


def _directory_lines(facts: dict[str, Any]) -> Iterator[str]:
    if not facts["is_directory"]:
        found = "a file, not a directory" if facts["exists"] else facts["refusal"] or "no such directory"
        yield f"ssd       {facts['path']}: {found}"
        return
    if not facts["writable"]:
        use = f"NOT WRITABLE ({facts['refusal'] or 'no space'})"
    else:
        use = "takes O_DIRECT" if facts["takes_direct"] else "refuses O_DIRECT (slower, buffered)"
    memory = ", LIES IN MEMORY, not on a drive" if facts["in_memory"] else ""
    yield f"ssd       {facts['path']}: {facts['file_system']}, {_size(facts['free_bytes'])} free, {use}{memory}"
    if facts["bytes_per_second"]:
        read, write, mixed = (facts["bytes_per_second"][name] / 1e9 for name in ("read", "write", "mixed"))
        yield f"          measured: read {read:.2f} GB/s, write {write:.2f} GB/s, both at once {mixed:.2f} GB/s together"
    elif facts["not_measured"]:
        yield f"          not measured: {facts['not_measured']}"


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"headrace": headrace.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numba", "numpy", "datasets", "safetensors"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _cpu() -> dict[str, Any]:
    fields = _fields(Path("/proc/cpuinfo"))
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or None,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "cgroup_cores": quota_cores(),
        "flags": [flag for flag in _FLAGS if flag in flags],
    }


def _memory() -> dict[str, Any]:
    fields = _fields(Path("/proc/meminfo"))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    chosen = text_of(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {
        "total_bytes": _kibibytes(fields.get("MemTotal")),
        "available_bytes": _kibibytes(fields.get("MemAvailable")),
        "swap_bytes": _kibibytes(fields.get("SwapTotal")),
        **_limits(),
        "locked_limit_bytes": None if soft == resource.RLIM_INFINITY else soft,
        "transparent_huge_pages": chosen[chosen.find("[") + 1 : chosen.find("]")] if chosen and "[" in chosen else None,
    }


def _limits() -> dict[str, int | None]:
    """Return what limits this process; nulls if torch, which `machine` needs, is missing."""
    try:
        from headrace.machine.limits import available_memory_bytes, control_group_limit_bytes, pinnable_memory_bytes
    except ImportError:
        return {"allowed_bytes": None, "cgroup_limit_bytes": None, "pinnable_bytes": None}
    return {
        "allowed_bytes": available_memory_bytes(),
        "cgroup_limit_bytes": control_group_limit_bytes(),
        "pinnable_bytes": pinnable_memory_bytes(),
    }


def _gpus() -> list[dict[str, Any]]:
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        name, capability = torch.cuda.get_device_name(index), f"{major}.{minor}"
        gpus.append({"name": name, "free_bytes": free_bytes, "total_bytes": total_bytes, "compute_capability": capability})
    return gpus


def _directory(path: Path, measure: bool) -> dict[str, Any]:
    from headrace.files import describe_directory, measure_directory
    from headrace.terms.errors import StorageError

    facts = describe_directory(path)
    order = ("path", "exists", "is_directory", "writable", "refusal", "file_system", "in_memory", "free_bytes", "takes_direct")
    values = figures(facts, *order) | {"path": str(path), "refusal": facts.refusal or None}
    values |= {"bytes_per_second": None, "not_measured": None if measure else "--no-measure"}
    if measure and facts.writable:
        try:
            read, write, mixed = measure_directory(path)
            values["bytes_per_second"] = {"read": round(read), "write": round(write), "mixed": round(mixed)}
        except StorageError as error:
            values["not_measured"] = str(error)
    return values


def _fields(path: Path) -> dict[str, str]:
    """Return by name the first value of each `name: value` line."""
    fields: dict[str, str] = {}
    for line in (text_of(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _kibibytes(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text else None


def _size(num_bytes: int | None, absent: str = "unknown") -> str:
    return absent if num_bytes is None else format_bytes(num_bytes)
