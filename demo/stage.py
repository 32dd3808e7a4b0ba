"""What both demos are told with: headings, lines, and `headrace` run in a process of its own."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
_UNITS = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}


@dataclass(frozen=True, slots=True)
class Places:
    """What a demo leaves, under the same names with either model: README.md and docs/start.md use them."""

    directory: Path

    @property
    def model(self) -> Path:
        """The model that was trained."""
        return self.directory / "model"

    @property
    def data(self) -> Path:
        """What it was trained on."""
        return self.directory / "data.jsonl"

    @property
    def run(self) -> Path:
        """The run that was killed and resumed."""
        return self.directory / "run"

    @property
    def ssd(self) -> Path:
        """The directory of states."""
        return self.directory / "ssd"


def run_headrace(*arguments: str, watch: Callable[[str, "subprocess.Popen[str]"], None] | None = None, expect: int = 0) -> int:
    """Run `headrace` in a process of its own, show its lines, and return its exit code, which must be `expect`."""
    print(f"\n    $ headrace {' '.join(show(word) for word in arguments)}", flush=True)
    command = [sys.executable, "-m", "headrace", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()) as process:
        assert process.stdout is not None
        for line in process.stdout:
            say(show(line.rstrip()))
            if watch is not None:
                watch(line, process)
    if process.returncode != expect:
        fail(f"headrace {arguments[0]}: exit code {process.returncode}, expected {expect}")
    return process.returncode


def refused(*arguments: str) -> str:
    """Run `headrace`, which must refuse with exit code 2, and return what it says."""
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode != 2:
        fail(f"headrace {arguments[0]}: exit code {done.returncode}, expected a refusal with 2: {done.stderr}")
    return done.stderr.strip()


def answer_of(*arguments: str) -> dict[str, Any]:
    """Show a `headrace` command with `--json`, run it, and return what it says."""
    values: dict[str, Any] = json.loads(text_of(*arguments))
    return values


def text_of(*arguments: str) -> str:
    """Show a `headrace` command, run it, and return what it writes to standard output."""
    print(f"\n    $ headrace {shlex.join(show(word) for word in arguments)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, env=environment())
    if not done.stdout:
        fail(f"headrace {arguments[0]}: exit code {done.returncode}: {done.stderr}")
    return done.stdout


def needed_mib(refusal: str) -> tuple[str, float] | None:
    """Return of which memory (host or device) a refusal says that more is needed, and how much; None if of neither."""
    words = re.search(r"(host|device) memory: at least ([0-9.]+) (KiB|MiB|GiB) are needed", refusal)
    return (words[1], float(words[2]) * _UNITS[words[3]]) if words else None


def environment() -> dict[str, str]:
    """Return this process's environment with the project on the path, so that the demo also runs without an installation."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def seconds_per_step(run: Path) -> float:
    """Return the median step time of a run, finished or not."""
    seconds = sorted(json.loads(line)["seconds"] for line in (run / "metrics.jsonl").open(encoding="utf-8"))
    return float(seconds[len(seconds) // 2])


def show(text: object) -> str:
    """Return `text` with paths below this directory, and those below the user's, shortened as a shell takes them."""
    return str(text).replace(f"{Path.cwd()}{os.sep}", "").replace(f"{Path.home()}{os.sep}", f"~{os.sep}")


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def say(text: str) -> None:
    """Print an indented line."""
    print(f"    {text}", flush=True)


def fail(text: str) -> NoReturn:
    """End the demo with an error."""
    raise SystemExit(f"\nFAILED: {text}")
