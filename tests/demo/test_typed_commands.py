"""README.md and docs/start.md can be typed: each command that they show is run, on a model that is made under the demo's names.

The model differs from the one that the pages tell of. So what is compared is the labels of the lines, not their figures.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from made_model import MadeModel
from stage import Places, environment

import demo

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/start.md")
FIRST_RUN = (
    "headrace train demo-run/model demo-run/data.jsonl --ssd demo-run/ssd --output demo-run/run --max-steps 2 --no-measure"
)
SIZES = "--sequence-length 64 --tokens-per-step 128"
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]+(\.\w+)?|.*[<>].*|\.\.\.")
_BOUND = re.compile(r"[A-Z]+=\S+")


class Shown(NamedTuple):
    """A command of a page, and the lines that the page shows under it."""

    command: str
    lines: tuple[str, ...]


def shown_in(text: str) -> list[Shown]:
    """Return what a page shows after `$`, one command after the other."""
    found: list[tuple[str, list[str]]] = []
    output: list[str] | None = None
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if line.startswith("    $ "):
            output = []
            found.append((line.removeprefix("    $ "), output))
        elif output is not None and line.startswith("    "):
            output.append(line.removeprefix("    "))
        else:
            output = None
    return [Shown(command, tuple(lines)) for command, lines in found]


def label(line: str) -> str:
    """Return what a line is called by: all words of a heading, what stands before two spaces or a colon, or "" of free text."""
    if line.startswith(" "):
        return " ".join(line.split())
    found = re.match(r"(\S.*?)(?:  +|: )", line)
    return found[1] if found else ""


def has_placeholder(command: str) -> bool:
    words = shlex.split(command, comments=True)
    ahead = words[: words.index(">")] if ">" in words else words
    return any(_PLACEHOLDER.fullmatch(word) for word in ahead if not word.startswith("{"))


class Terminal:
    """Types commands in a folder, in a home of its own. A server that was started answers until the next command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bound = folder, list[str]()
        self.server: subprocess.Popen[str] | None = None
        self.address = ""
        script = folder / "bin" / "headrace"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headrace "$@"\n')
        script.chmod(0o755)
        places = {name: str(folder / "home" / name) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
        path = os.pathsep.join((str(script.parent), os.environ["PATH"]))
        self.environment = environment() | places | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
        for place in places.values():
            Path(place).mkdir(parents=True)

    def start(self, command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["sh", "-c", "\n".join((*self.bound, f"exec {command}" if command.startswith("headrace") else command))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )

    def type(self, command: str) -> list[str]:
        """Return the lines of a command, which must end well."""
        words = shlex.split(command, comments=True)
        if words[0] == "curl":
            return [self.ask(words[1], words[words.index("-H") + 1], words[words.index("-d") + 1])]
        self.end_server()
        if _BOUND.fullmatch(words[0]):
            self.bound.append(words[0])
            return []
        if words[:2] == ["headrace", "serve"]:
            return list(self.serve(command))
        process = self.start(command)
        lines = process.communicate()[0]
        assert process.returncode == 0, (command, lines)
        return lines.splitlines()

    def serve(self, command: str) -> Iterator[str]:
        """Start a server on a free port; its lines end with its address."""
        self.server = self.start(f"{shlex.join(shlex.split(command, comments=True))} --port 0")
        assert self.server.stdout is not None
        for line in self.server.stdout:
            yield line.rstrip("\n")
            if found := re.fullmatch(r"\S+ answers at (http://127\.0\.0\.1:\d+)/v1; .*\n", line):
                self.address = found[1]
                return
        pytest.fail(f"{command}: it ended before it answered")

    def ask(self, url: str, header: str, data: str) -> str:
        """Ask the server what a page asks with curl; return the names in its answer."""
        assert self.server is not None, "no server was started"
        path = re.sub(r"https?://[^/]+", "", url)
        name, _, value = header.partition(": ")
        request = urllib.request.Request(self.address + path, data=data.encode(), headers={name: value})
        with urllib.request.urlopen(request, timeout=240) as answer:
            found = json.load(answer)
        assert found["choices"][0]["message"]["role"] == "assistant"
        return ", ".join(found)

    def end_server(self) -> None:
        """End the server by Ctrl-C, after which it must end well."""
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            told = self.server.communicate(timeout=240)[0]
            assert self.server.returncode == 0, told
            self.server = None

    def close(self) -> None:
        """Leave nothing running."""
        if self.server is not None:
            self.server.kill()
            self.server.communicate()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    places = Places(tmp_path / "demo-run")
    places.ssd.mkdir(parents=True)
    MadeModel(places).make_model_and_data()
    terminal = Terminal(tmp_path)
    try:
        terminal.type(f"{FIRST_RUN} {SIZES}")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.process
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", PAGES)
def test_each_command_of_the_first_pages_can_be_typed(page: str, terminal: Terminal) -> None:
    shown = [each for each in shown_in((ROOT / page).read_text(encoding="utf-8")) if not has_placeholder(each.command)]
    assert len(shown) >= 5
    for command, lines in shown:
        found = iter([label(line) for line in terminal.type(command)])
        missing = [told for told in map(label, lines) if told and told not in found]
        assert missing == [], command
    terminal.end_server()


def test_the_demo_ends_with_commands_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    shown = [each.command for each in shown_in((ROOT / "README.md").read_text(encoding="utf-8"))]
    ends = demo.next_commands(Places(ROOT / "demo-run"))
    assert len(ends) == 3
    assert set(ends) <= set(shown)


def test_commands_their_lines_and_their_placeholders_are_found() -> None:
    page = "Do\n\n    $ a b \\\n        --c\n    peak   1\n           host  ssd\n    $ d\n\nand\n\n    e\n"
    shown = shown_in(page)
    assert shown == [Shown("a b --c", ("peak   1", "       host  ssd")), Shown("d", ())]
    assert [label(line) for line in (*shown[0].lines, "done: 4 steps", "Free text.")] == ["peak", "host ssd", "done", ""]
    assert [has_placeholder(each) for each in ("h plan MODEL", "h x ...", "git clone <it> a", "h plan $MODEL # MODEL")] == [
        *(True, True, True),
        False,
    ]
