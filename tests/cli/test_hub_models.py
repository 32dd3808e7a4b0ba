"""Models by their names on the Hub, against a double of it. Run: pytest tests/cli/test_hub_models.py"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_double import COMMIT, hub_of
from tiers import sampled

from headrace.terms.sizes import format_bytes

NAME = "owner/small-model"
FETCH = (
    "import sys; from headrace.files.hub import fetched_model; print(fetched_model(sys.argv[1], lambda words: print(words)))"
)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (folder / "pytorch_model.bin").write_bytes(b"never fetched")
    return folder


def run(tmp_path: Path, endpoint: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", **more}
    env.pop("HF_HUB_OFFLINE", None)
    return subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)


def start(tmp_path: Path, endpoint: str, *words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    env.pop("HF_HUB_OFFLINE", None)
    return subprocess.Popen(
        [sys.executable, *words], env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def wait_until(there: Callable[[], bool]) -> None:
    for _ in range(12_000):  # two minutes, which only end a standstill
        if there():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.wide
def test_a_model_is_fetched_with_its_size_said_and_then_is_there_without_a_network(tmp_path, files):
    with hub_of(NAME, files) as hub:
        fetched = run(tmp_path, hub.address, "-c", FETCH, NAME)
        assert f"{NAME}: fetching 1 MiB of 1 MiB into {tmp_path / 'home' / 'hub'}" in fetched.stdout, fetched
        directory = Path(fetched.stdout.splitlines()[-1])
        asked = len([path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path])
        again = run(tmp_path, hub.address, "-c", FETCH, NAME)
        assert again.stdout.splitlines() == [str(directory)], again
        assert len([path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]) == asked
    assert directory.name == COMMIT
    assert (directory / "model.safetensors").read_bytes() == (files / "model.safetensors").read_bytes()
    assert not (directory / "pytorch_model.bin").exists()
    assert run(tmp_path, hub.address, "-c", FETCH, NAME).stdout.splitlines() == [str(directory)]
    (directory / "model.safetensors").unlink()
    assert "there is no whole copy" in run(tmp_path, hub.address, "-c", FETCH, NAME).stderr


@pytest.mark.deep  # the library tries five times, and waits between
def test_a_connection_that_breaks_again_and_again_ends_in_one_line(tmp_path, files):
    with hub_of(NAME, files) as hub:
        hub.cut_bytes = 300_000
        broken = run(tmp_path, hub.address, "-m", "headrace", "generate", NAME, "--prompt", "x")
        assert broken.returncode == 2
        assert "The same command goes on where it stopped" in broken.stderr
        hub.cut_bytes = None
        whole = run(tmp_path, hub.address, "-c", FETCH, NAME)
    fetched = Path(whole.stdout.splitlines()[-1]) / "model.safetensors"
    assert fetched.read_bytes() == (files / "model.safetensors").read_bytes()


@pytest.mark.wide
def test_a_download_that_was_killed_goes_on_where_it_stopped(tmp_path, files):
    weights = bytes(range(256)) * (12 << 12)
    (files / "model.safetensors").write_bytes(weights)
    with hub_of(NAME, files) as hub:
        hub.stall_bytes = 11 << 20  # the library writes 10 MiB at once
        process = start(tmp_path, hub.address, "-c", FETCH, NAME)
        wait_until(lambda: any(part.stat().st_size for part in tmp_path.rglob("*.headrace-part")))
        process.kill()
        process.wait()
        hub.stall_bytes = None
        hub.requests.clear()
        (part,) = tmp_path.rglob("*.headrace-part")
        there = part.stat().st_size
        whole = run(tmp_path, hub.address, "-c", FETCH, NAME)
        assert whole.returncode == 0, whole.stderr
        sent = [(path.rpartition("/")[2], more.get("Range")) for method, path, more in hub.requests if method == "GET"]
    assert ("model.safetensors", f"bytes={there}-") in sent
    assert [name for name, _ in sent].count("model.safetensors") == 1
    assert f"fetching {format_bytes(len(weights) - there)} of {format_bytes(len(weights))}" in whole.stdout, "and config.json"
    assert (Path(whole.stdout.splitlines()[-1]) / "model.safetensors").read_bytes() == weights
    assert not list(tmp_path.rglob("*.headrace-part"))


@pytest.mark.wide
def test_a_part_that_is_not_of_the_file_is_found_by_its_digest_and_fetched_again(tmp_path, files):
    weights = (files / "model.safetensors").read_bytes()
    with hub_of(NAME, files) as hub:
        part = tmp_path / "home" / "hub" / "models--owner--small-model" / "blobs" / f"{digest_of(weights)}.headrace-part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"x" * 1000)
        damaged = run(tmp_path, hub.address, "-c", FETCH, NAME)
        assert "has another digest than the Hub says" in damaged.stderr
        whole = run(tmp_path, hub.address, "-c", FETCH, NAME)
    assert (Path(whole.stdout.splitlines()[-1]) / "model.safetensors").read_bytes() == weights


@pytest.mark.deep  # two fresh processes train
def test_a_data_set_of_the_hub_is_read_as_it_comes(tmp_path, files, world):
    rows = [{"text": f"water {number}"} for number in range(40)]
    (files / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (files / "README.md").write_text("rows")
    by_file, by_name = world.folder / "by-file", world.folder / "by-name"
    with hub_of("owner/rows", files) as hub:
        for data, out in ((str(files / "train.jsonl"), by_file), ("owner/rows", by_name)):
            world.data = data
            words = world.train_words("--streaming", max_steps=3, output=out)
            ended = run(tmp_path, hub.address, "-m", "headrace", *words)
            assert ended.returncode == 0, ended.stderr
    assert not list((tmp_path / "home").rglob("*.arrow")), "no copy is kept"
    losses = [[json.loads(line)["loss"] for line in (out / "metrics.jsonl").open()] for out in (by_file, by_name)]
    assert losses[0] == losses[1]


@pytest.mark.wide
def test_a_model_that_asks_for_access_gets_the_users_token_and_is_refused_without(tmp_path, files):
    with hub_of(NAME, files) as hub:
        hub.token = "hf_mine"
        refused = run(tmp_path, hub.address, "-m", "headrace", "generate", NAME, "--prompt", "x")
        assert refused.returncode == 2
        assert "log in with `hf auth login`" in refused.stderr
        assert run(tmp_path, hub.address, "-c", FETCH, NAME, HF_TOKEN="hf_mine").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    sampled(
        [
            (["train", NAME, "data.jsonl"], f"model: {NAME}: no such directory here"),
            (["train", "run.yaml"], f"model: {NAME}: no such directory here"),
            (["eval", NAME, "--data", "data.jsonl"], f"model: {NAME}: no such directory here"),
            (["train", ".", "owner/data"], "owner/data: no such file or directory here, and the Hub did not answer"),
        ]
    ),
)
def test_without_a_network_one_line_says_so_at_once(tmp_path, words, said):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "run.yaml").write_text(f"model: {NAME}\ndata: data.jsonl\noutput: out\n")
    refused = run(tmp_path, "http://127.0.0.1:9", "-X", "importtime", "-m", "headrace", *words)
    imports = {line.rpartition("|")[2].strip() for line in refused.stderr.splitlines() if line.startswith("import time:")}
    assert "headrace" in imports
    assert "torch" not in imports  # importing that takes seconds
    assert refused.returncode == 2
    (line,) = (line for line in refused.stderr.splitlines() if not line.startswith("import time:"))
    assert line.startswith(f"error: {said}")
    assert not (tmp_path / "runs").exists()
