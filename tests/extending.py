"""The worked examples of docs/extending.md, applied to a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"```python\n# ([\w/]+\.py), (new in|in|above) ([\w/ ]+)\n(.*?)```", re.DOTALL)


def apply(section: str, folder: Path) -> set[str]:
    """Copy the package into `folder` and make the edits of a section of the page; return the files that they touch.

    An edit stands `in` the lines that a name opens, or `above` these.
    """
    shutil.copytree(ROOT / "headrace", folder / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    touched = set()
    for name, how, place, code in _BLOCK.findall(text):
        path = folder / (f"{place}/{name}" if how == "new in" else name)
        touched.add(str(path.relative_to(folder)))
        if how == "new in":
            assert not path.exists(), path
            path.parent.mkdir(exist_ok=True)  # a system has a folder of its own
            path.write_text(code, encoding="utf-8")
            continue
        before, line, after = re.split(rf"(^ *{place}\b.*\n)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        joined = (line, code) if how == "in" else (code, "" if line.startswith(" ") else "\n\n", line)
        path.write_text(before + "".join(joined) + after, encoding="utf-8")
    return touched


def run(folder: Path, *words: object) -> str:
    """Run Python on the copy in `folder`; return what it prints."""
    env = os.environ | {"PYTHONPATH": str(folder), "HOME": str(folder)}  # caches of data lie at home
    words = (sys.executable, *map(str, words))
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout.decode()  # line ends as they were printed
