"""Models by their names on the Hub, against a double of it. Run: pytest tests/cli/test_hub_models.py"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_double import COMMIT, hub_of

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
def test_a_download_that_broke_off_keeps_whole_files_and_goes_on(tmp_path, files):
    with hub_of(NAME, files) as hub:
        hub.cut_bytes = 300_000
        broken = run(tmp_path, hub.address, "-m", "headrace", "generate", NAME, "--prompt", "x")
        assert broken.returncode == 2
        assert "files that are whole stay" in broken.stderr
        hub.cut_bytes = None
        hub.requests.clear()
        whole = run(tmp_path, hub.address, "-c", FETCH, NAME)
        sent = [path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert sent == ["model.safetensors"]
    assert (Path(whole.stdout.splitlines()[-1]) / "model.safetensors").read_bytes() == (
        files / "model.safetensors"
    ).read_bytes()


def test_a_model_that_asks_for_access_gets_the_users_token_and_is_refused_without(tmp_path, files):
    with hub_of(NAME, files) as hub:
        hub.token = "hf_mine"
        refused = run(tmp_path, hub.address, "-m", "headrace", "generate", NAME, "--prompt", "x")
        assert refused.returncode == 2
        assert "log in with `hf auth login`" in refused.stderr
        assert run(tmp_path, hub.address, "-c", FETCH, NAME, HF_TOKEN="hf_mine").returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", NAME, "data.jsonl"], f"model: {NAME} is no directory here"),
        (["train", "run.yaml"], f"model: {NAME} is no directory here"),
        (["eval", NAME, "--data", "data.jsonl"], f"model: {NAME} is no directory here"),
        (["train", ".", "owner/data"], "owner/data: no such file or directory here, and the Hub did not answer"),
    ],
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
