"""`bench/residency.py`: its model of a page cache, the GGUF file it writes, the table, and a small run beside llama.cpp.

Run: pytest tests/bench/test_bench_residency.py
"""

import json
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import residency
import torch
from mixture_files import Sizes, make_model
from residency import OURS, THEIRS, CachedExperts, LastUsed, table, winner
from safetensors.torch import load_file

SMALL = Sizes(hidden=128, width=64, blocks=2, experts=8, choices=2)


def test_what_was_used_last_stays() -> None:
    drawn, trace = random.Random(1), list[int]()
    cache, room, found = LastUsed(5), 5, 0
    for _ in range(200):
        used = drawn.sample(range(12), 3)
        # Written anew: an expert is there if fewer than `room` others were used since it last was.
        held = list(dict.fromkeys(reversed(trace)))[:room]
        assert cache.use(used) == sum(each in held for each in used)
        found += sum(each in held for each in used)
        trace += used
    assert 0 < found < 600
    assert list(cache.held) == list(dict.fromkeys(reversed(trace)))[:room][::-1]


def test_a_file_for_llama_cpp_has_the_same_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    make_model(tmp_path, SMALL)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    written = {each.name: each for each in reader.tensors}

    def read(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.quants.dequantize(written[name].data, written[name].tensor_type).copy())

    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(read("token_embd.weight"), stored["model.embed_tokens.weight"].float())
    for block in range(SMALL.blocks):
        own = f"model.layers.{block}"
        pairs = {"attn_q": "self_attn.q_proj", "attn_k_norm": "self_attn.k_norm", "ffn_gate_inp": "mlp.gate"}
        for name, ours in pairs.items():
            assert torch.equal(read(f"blk.{block}.{name}.weight"), stored[f"{own}.{ours}.weight"].float())
        for part in ("gate", "up", "down"):
            stack = read(f"blk.{block}.ffn_{part}_exps.weight")
            for expert in range(SMALL.experts):
                assert torch.equal(stack[expert], stored[f"{own}.mlp.experts.{expert}.{part}_proj.weight"].float())
    data = (tmp_path / "model.gguf").read_bytes()
    start, stop = CachedExperts(tmp_path / "model.gguf", SMALL).ranges[1, 3][0]
    there = torch.frombuffer(bytearray(data[start:stop]), dtype=torch.bfloat16)
    part = next(name for name in written if name.startswith("blk.1.") and "_exps" in name).split("_")[1]
    assert torch.equal(there, stored[f"model.layers.1.mlp.experts.3.{part}_proj.weight"].flatten())


def test_experts_that_are_not_held_leave_the_page_cache(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    sizes = Sizes(hidden=512, width=512, blocks=1, experts=8, choices=2)
    make_model(tmp_path, sizes)
    os.sync()
    cached = CachedExperts(tmp_path / "model.gguf", sizes)
    cached.read_anew([])
    with (tmp_path / "model.gguf").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as own:
        own.madvise(mmap.MADV_RANDOM)
        if cached.share() > 0.1:
            pytest.skip("this file system keeps files in memory")
        assert sum(own[::4096]) > 0
        assert cached.share() == 1
        cached.hold([(0, 2), (0, 3)])
        assert 0.2 < cached.share() < 0.35, "two of eight, and pages that lie across two"


def test_the_table_says_which_policy_won() -> None:
    def of(name: str, seconds: float, hits: float) -> dict[str, Any]:
        return {
            "share": 0.25,
            "name": name,
            "seconds": seconds,
            "hits": hits,
            "read_bytes": 2e6,
            "same": 1.0,
            "cached": 0.25,
            "router_share": 0.1,
        }

    runs = [of(OURS, 0.010, 0.30), of(THEIRS, 0.020, 0.40), of(OURS, 9.0, 0.30), of(THEIRS, 0.030, 0.40), of(OURS, 0.010, 0.3)]
    cells = [cell.strip() for cell in table(runs).splitlines()[2].split("|")[1:-1]]
    assert cells[:4] == ["25.0%", "10.0", "25.0", "2.50"]
    assert cells[10:12] == [OURS, "those last used"]
    assert winner(1.0, 1.01, least=True) == "equal"
    assert winner(1.0, 1.1, least=False) == THEIRS


@pytest.mark.deep
@pytest.mark.process
@pytest.mark.timeout(900)
def test_a_small_run_beside_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    out = tmp_path / "found.json"
    words = ["--scratch", str(tmp_path), "--rounds", "1", "--tokens", "8", "--shares", "1.0,0.25", "--output", str(out)]
    command = [sys.executable, str(Path(residency.__file__)), *words, "--sizes", json.dumps({"hidden": 256, "blocks": 2})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = json.loads(out.read_text())["runs"]
    whole, quarter = runs[:2], runs[2:]
    assert [run["hits"] for run in whole] != [run["hits"] for run in quarter]
    assert whole[0]["tokens"] == quarter[0]["tokens"], "what is kept changes no bit"
    assert whole[0]["read_bytes"] < quarter[0]["read_bytes"]
    assert {run["name"] for run in runs} == {OURS, THEIRS}
