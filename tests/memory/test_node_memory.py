"""What a node and a worker take of memory, measured: a worker the same of a model twice as deep, a node what it may."""

import re
from pathlib import Path

import node_processes
import pytest
from node_machines import Machines

from headrace.report.metrics import read_metrics
from headrace.terms.sizes import MIB

pytestmark = pytest.mark.process

SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
BLOCK_BYTES = 2 * (4 * 384 * 384 + 3 * 384 * 1024)


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_a_worker_takes_no_more_of_a_deeper_model_and_a_node_no_more_than_it_may(tmp_path: Path) -> None:
    peaks = []
    for blocks in (24, 48):
        folder = tmp_path / str(blocks)
        folder.mkdir()
        node_processes.write_model(folder, num_hidden_layers=blocks, **SHAPE)
        machines = Machines(folder, "run", 1, "immediate", max_steps=3, host_memory="600MiB")
        machines.hire(host_memory="480MiB")  # too little to keep what was fetched
        machines.finish(seconds=400)
        peaks.append(1024 * int(re.findall(r"peak (\d+) KiB", machines.said_by(1).read_text())[-1]))
        taken = [record["peak_bytes"]["host"] for record in read_metrics(machines.output / "metrics.jsonl")]
        assert max(taken) <= 600 * MIB, "the node's, runtime included"
    # Weights of 24 blocks more would be 85 MB. What grows is block inputs (4 MB), modules, and what the heap keeps.
    assert peaks[1] - peaks[0] < 12 * BLOCK_BYTES, peaks
