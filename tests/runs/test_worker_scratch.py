"""What a killed worker leaves, on its drives too, goes with the next one that works there; a living one's stays."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.files.scratch import scratch
from headrace.peers.node.working import _SCRATCH, _discard

pytestmark = pytest.mark.process

KILLED = """
import os, signal, sys
from pathlib import Path
from headrace.files.scratch import scratch
from headrace.store import StateStore, StoreRequest
drives = [Path(word) for word in sys.argv[2:]]
with scratch(drives[0], sys.argv[1]) as folder:
    StateStore.create(folder, StoreRequest(drives, [], 1 << 20, allow_tmpfs=True), sink=lambda event: None)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_leaves_its_drives_to_the_next(tmp_path: Path) -> None:
    drives = [tmp_path / name for name in ("one", "two")]
    for drive in drives:
        drive.mkdir()
    with scratch(drives[0], _SCRATCH) as living:
        command = [sys.executable, "-c", KILLED, _SCRATCH, *map(str, drives)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert [len(list(drive.iterdir())) for drive in drives] == [3, 1], "a directory and a store's folder were left"
        with scratch(drives[0], _SCRATCH, _discard) as own:
            assert sorted(drives[0].iterdir()) == sorted([living, own])
            assert not list(drives[1].iterdir())
    assert not list(drives[0].iterdir())
