"""What a process may still take of memory and cores, on made machines: /proc and /sys trees in a folder.

Run: pytest tests/machine
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.machine import near_limit
from headrace.machine.control_groups import quota_cores
from headrace.machine.limits import available_memory_bytes, control_group_limit_bytes, pinnable_memory_bytes, usual_host_bytes
from headrace.machine.near_limit import NearLimit
from headrace.terms.events import Event, Notice
from headrace.terms.options.budget import default_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNLIMITED_V1 = "9223372036854771712"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n"


class Machine:
    """A folder that looks like `/`."""

    def __init__(self, root: Path, *, available: int = 8 * GIB, total: int = 16 * GIB, version: str = "Linux 6.1") -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {total // KIB} kB\nMemAvailable: {available // KIB} kB\n")
        self.write("proc/version", version)

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def group(self, path: str, limit: object, used: int, **statistics: int) -> None:
        """A group of version 2."""
        self.write(f"sys/fs/cgroup/{path}/memory.max", limit)
        self.write(f"sys/fs/cgroup/{path}/memory.current", used)
        self.write(f"sys/fs/cgroup/{path}/memory.stat", "".join(f"{name} {size}\n" for name, size in statistics.items()))

    def old_group(self, path: str, limit: object, used: int, *, hierarchy: int = 1, **statistics: int) -> None:
        """A group of version 1."""
        for name, value in (("limit_in_bytes", limit), ("usage_in_bytes", used), ("use_hierarchy", hierarchy)):
            self.write(f"sys/fs/cgroup/memory/{path}/memory.{name}", value)
        lines = "".join(f"{name} {size}\n" for name, size in statistics.items())
        self.write(f"sys/fs/cgroup/memory/{path}/memory.stat", lines)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_it_is_the_kernels_estimate(machine: Machine) -> None:
    assert available_memory_bytes(machine.root) == 8 * GIB
    assert control_group_limit_bytes(machine.root) is None


def test_where_nothing_can_be_read_nothing_is_limited(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) >= 1 << 60


def test_a_group_that_is_almost_full_is_told_of_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_limit, "_EVERY_SECONDS", 1e6)
    told: list[Event] = []
    machine.write("proc/self/cgroup", "0::/user/run")
    machine.group("user/run", 4 * GIB, 4 * GIB, inactive_file=GIB)
    with NearLimit(told.append, machine.root) as near:
        near.look()
        assert told == [], "page cache can be dropped"
        machine.group("user/run", 4 * GIB, 4 * GIB - 50 * MIB)
        near.look()
        near.look()
    words = [event.text for event in told if isinstance(event, Notice)]
    assert len(words) == 1
    assert words[0].startswith("memory: a control group allows 4 GiB, and 3.95 GiB of it are taken")
    assert "--host-memory" in words[0]


class TestVersion2:
    def test_the_rest_of_its_own_group(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/user/run")
        machine.group("user/run", 3 * GIB, GIB)
        assert available_memory_bytes(machine.root) == 2 * GIB
        assert control_group_limit_bytes(machine.root) == 3 * GIB

    def test_the_tightest_group_above_counts_with_what_its_other_members_use(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/user/run")
        machine.group("user/run", "max", GIB)
        machine.group("user", 4 * GIB, 3 * GIB)
        machine.group("user/other", 10 * MIB, 0)  # not ours
        assert available_memory_bytes(machine.root) == GIB

    def test_page_cache_and_slab_that_can_be_dropped_count_as_free(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/run")
        machine.group("run", 4 * GIB, 4 * GIB, inactive_file=GIB, active_file=GIB // 2, slab_reclaimable=GIB // 4, anon=GIB)
        assert available_memory_bytes(machine.root) == GIB + GIB // 2 + GIB // 4

    def test_above_memory_high_a_process_is_slowed_to_a_halt_so_it_is_a_limit_too(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/run")
        machine.group("run", 4 * GIB, GIB)
        machine.write("sys/fs/cgroup/run/memory.high", 2 * GIB)
        assert available_memory_bytes(machine.root) == GIB

    def test_a_group_that_is_full_leaves_nothing(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/run")
        machine.group("run", GIB, 2 * GIB)
        assert available_memory_bytes(machine.root) == 0

    @pytest.mark.parametrize("path", ["/host/path/not/mounted/here", "/../../other", "/"])
    def test_in_a_container_the_mounted_root_is_ours(self, machine: Machine, path: str) -> None:
        machine.write("proc/self/cgroup", f"0::{path}")
        machine.group("", 512 * MIB, 0)
        assert available_memory_bytes(machine.root) == 512 * MIB

    def test_a_name_with_a_colon(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/a:b")
        machine.group("a:b", MIB, 0)
        assert available_memory_bytes(machine.root) == MIB


class TestVersion1:
    def test_groups_above_count_and_cache_is_free(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "6:cpu,cpuacct:/elsewhere\n5:memory:/docker/x\n0::/")
        machine.old_group("docker/x", UNLIMITED_V1, GIB)
        machine.old_group("docker", 3 * GIB, 2 * GIB, inactive_file=1, total_inactive_file=GIB // 2, total_active_file=GIB // 4)
        assert available_memory_bytes(machine.root) == GIB + GIB // 2 + GIB // 4
        assert control_group_limit_bytes(machine.root) == 3 * GIB

    def test_a_group_above_that_does_not_count_its_children_is_no_limit(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "5:memory:/docker/x")
        machine.old_group("docker/x", 2 * GIB, 0, hierarchy=0)
        machine.old_group("docker", MIB, 0, hierarchy=0)
        assert available_memory_bytes(machine.root) == 2 * GIB

    def test_no_limit_is_a_huge_number(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "5:memory:/x")
        machine.old_group("x", UNLIMITED_V1, GIB)
        assert control_group_limit_bytes(machine.root) is None


class TestCores:
    """CPU time a second, as container engines limit it."""

    def test_without_a_limit_there_is_none(self, machine: Machine) -> None:
        assert quota_cores(machine.root) is None
        machine.write("proc/self/cgroup", "4:cpu,cpuacct:/x\n0::/y")
        machine.write("sys/fs/cgroup/y/cpu.max", "max 100000")
        machine.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1")
        machine.write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000")
        assert quota_cores(machine.root) is None

    def test_the_least_of_its_groups_and_those_above(self, machine: Machine) -> None:
        machine.write("proc/self/cgroup", "0::/pod/container")
        machine.write("sys/fs/cgroup/pod/container/cpu.max", "800000 100000")
        assert quota_cores(machine.root) == 8
        machine.write("sys/fs/cgroup/pod/cpu.max", "125000 50000")
        assert quota_cores(machine.root) == 2.5

    @pytest.mark.parametrize("top", ["cpu", "cpu,cpuacct"])
    def test_version_1_has_it_in_two_files(self, machine: Machine, top: str) -> None:
        machine.write("proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n5:memory:/docker/x")
        machine.write(f"sys/fs/cgroup/{top}/cpu.cfs_quota_us", "-1")
        machine.write(f"sys/fs/cgroup/{top}/docker/x/cpu.cfs_quota_us", "150000")
        machine.write(f"sys/fs/cgroup/{top}/docker/x/cpu.cfs_period_us", "100000")
        assert quota_cores(machine.root) == 1.5

    @pytest.mark.parametrize("text", ["", "max", "100000", "0 0", "nonsense 100000"])
    def test_what_cannot_be_read_limits_nothing(self, machine: Machine, text: str) -> None:
        machine.write("proc/self/cgroup", "0::/")
        machine.write("sys/fs/cgroup/cpu.max", text)
        assert quota_cores(machine.root) is None


class TestResourceLimits:
    @pytest.mark.parametrize(
        ("name", "field"), [("Max address space         ", "VmSize"), ("Max data size             ", "VmData")]
    )
    def test_the_rest_below_the_soft_limit(self, machine: Machine, name: str, field: str) -> None:
        machine.write("proc/self/limits", f"{LIMITS}{name}{2 * GIB}           unlimited            bytes")
        machine.write("proc/self/status", f"Name:\tpython\n{field}:\t{MIB} kB")
        assert available_memory_bytes(machine.root) == GIB

    def test_unlimited_is_no_limit(self, machine: Machine) -> None:
        machine.write("proc/self/limits", f"{LIMITS}Max address space         unlimited            unlimited            bytes")
        assert available_memory_bytes(machine.root) == 8 * GIB

    def test_a_real_process_with_a_real_limit(self) -> None:
        """The words of this kernel's /proc are those that the made machines use."""
        code = (
            "import resource\nfrom headrace.machine.limits import available_memory_bytes\n"
            "used = 1024 * int(open('/proc/self/status').read().split('VmData:')[1].split()[0])\n"
            f"resource.setrlimit(resource.RLIMIT_DATA, (used + {64 * MIB}, resource.RLIM_INFINITY))\n"
            "print(available_memory_bytes())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280)
        assert 0 < int(done.stdout) <= 64 * MIB


class TestDefaults:
    def test_seventy_per_cent_of_what_is_available(self, machine: Machine) -> None:
        assert usual_host_bytes(machine.root, pins=True) == usual_host_bytes(machine.root, pins=False) == 8 * GIB * 7 // 10

    def test_under_wsl_half_of_memory_can_be_pinned(self, tmp_path: Path) -> None:
        version = "Linux version 5.15.146.1-microsoft-standard-WSL2"
        machine = Machine(tmp_path, available=15 * GIB, total=16 * GIB, version=version)
        assert pinnable_memory_bytes(machine.root) == 8 * GIB
        assert usual_host_bytes(machine.root, pins=True) == 8 * GIB
        assert usual_host_bytes(machine.root, pins=False) == 15 * GIB * 7 // 10

    def test_elsewhere_no_cap_is_known(self, machine: Machine) -> None:
        assert pinnable_memory_bytes(machine.root) is None

    @pytest.mark.parametrize(("tier", "percent"), [("device", 90), ("host", 70), ("ssd", 90)])
    def test_each_tier_leaves_something_to_the_rest_of_the_machine(self, tier: str, percent: int) -> None:
        assert default_bytes(tier, 1000) == 10 * percent


def test_this_machine_has_some() -> None:
    assert 0 < available_memory_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
