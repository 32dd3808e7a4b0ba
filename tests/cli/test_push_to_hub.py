"""`headrace export --push-to-hub`, against a double of the Hub. Run: pytest tests/cli/test_push_to_hub.py"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_worlds import World
from forked import PROCESSES
from hub_double import HubDouble, hub_of
from huggingface_hub import constants

from headrace.cli import main

NAME = "owner/trained-here"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    (tmp_path / "kept").mkdir()
    with hub_of(NAME, tmp_path / "kept") as double:
        monkeypatch.setattr(constants, "ENDPOINT", double.address)
        template = double.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "of-a-test")
        double.token = "of-a-test"
        yield double


def push(address: str, words: tuple[str, ...]) -> None:
    """The command, in a process of its own."""
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET, constants.HF_HUB_OFFLINE = address, True, False
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"
    os.environ["HF_TOKEN"] = "of-a-test"
    main(list(words))


def leave(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def test_a_run_is_sent_and_what_broke_off_is_sent_again(
    world: World, hub: HubDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*world.train_words()) == 0
    out = world.folder / "out"
    words = ("export", world.run, out, "--push-to-hub", NAME, "--private")
    hub.refuse_commits = True
    assert leave(*words) != 0
    assert f"{NAME} was not sent whole (HfHubHTTPError" in (said := capsys.readouterr().err)
    assert "the same command sends it again" in said
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    hub.refuse_commits = False
    assert leave(*words) == 0
    assert f"{NAME} is at {hub.address}/{NAME}" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before, "the export was whole"
    assert len(hub.sent) == 1, "weights are not sent twice"
    assert hub.private
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in hub.directory.iterdir()
    }
    (out / "headrace.json").write_text("{}")
    assert "exists" in world.refused(*words)
    assert leave("export", world.run, world.folder / "out.gguf", "--push-to-hub", NAME) == 0
    assert hub.commits[-1] == ["out.gguf"]
    assert (hub.directory / "out.gguf").read_bytes() == (world.folder / "out.gguf").read_bytes()


def test_what_cannot_be_sent_is_refused_before_anything_is_written(
    world: World, hub: HubDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leave(*world.train_words()) == 0
    words = ("export", world.run, world.folder / "out", "--push-to-hub")
    assert "give OWNER/NAME" in world.refused(*words, "no name at all")
    assert "given without push_to_hub" in world.refused("export", world.run, world.folder / "out", "--private")
    hub.token = "another"
    assert "the Hub does not take the token" in world.refused(*words, NAME)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(world.folder / "none"))
    assert "log in with" in world.refused(*words, NAME)
    monkeypatch.setenv("HF_TOKEN", "of-a-test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "did not answer" in world.refused(*words, NAME)
    assert not (world.folder / "out").exists()
    assert not [path for _, path, _ in hub.requests if path == "/api/repos/create"]


@pytest.mark.wide
def test_adapters_are_not_sent_where_a_merged_model_is_asked_for(world: World, hub: HubDouble) -> None:
    assert leave(*world.train_words("--adapter", "lora:rank=2")) == 0
    words = ("export", world.run, world.folder / "out", "--push-to-hub", NAME)
    assert leave(*words) == leave(*words) == 0
    assert "exists" in world.refused(*words, "--merge")


@pytest.mark.process
def test_killed_while_a_file_is_sent_the_same_command_sends_the_rest(world: World, hub: HubDouble) -> None:
    assert leave(*world.train_words()) == 0
    out, reached, go_on = world.folder / "out", threading.Event(), threading.Event()
    words = ("export", str(world.run), str(out), "--push-to-hub", NAME)
    hub.at_upload = lambda: (reached.set(), go_on.wait(120))
    process = PROCESSES.Process(target=push, args=(hub.address, words))
    process.start()
    assert reached.wait(120), process.exitcode
    process.kill()
    process.join()
    go_on.set()
    assert not hub.commits
    assert leave(*words) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in hub.directory.iterdir()
    }
