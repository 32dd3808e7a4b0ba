"""Chat samples made of what Python's own library says of itself: a question about a name, answered by its docstring.

Invariant: the same Python gives the same samples in the same order; no name and no answer is in both parts.
"""

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# Those that people use, and that do nothing when they are imported. What this Python lacks is left out.
_MODULES = """
    argparse array ast asyncio base64 binascii bisect builtins bz2 calendar cmath codecs collections configparser contextlib
    copy csv ctypes dataclasses datetime decimal difflib dis doctest email.message enum filecmp fileinput fnmatch fractions
    ftplib functools gc getpass gettext glob graphlib gzip hashlib heapq hmac html html.parser http.client http.cookies
    imaplib importlib.util inspect io ipaddress itertools json linecache locale logging logging.handlers lzma mailbox math
    mimetypes mmap multiprocessing.pool numbers operator os pathlib pdb pickle pkgutil platform plistlib pprint profile queue
    random re sched secrets selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl stat statistics
    string struct subprocess symtable sys tarfile tempfile textwrap threading time timeit tokenize traceback tracemalloc types
    unittest unittest.mock urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.dom.minidom
    xml.etree.ElementTree zipfile zlib zoneinfo
"""
_LEAST_CHARACTERS, _MOST_CHARACTERS = 40, 300
_SENTENCES = re.compile(r"[A-Z][^<>{}=]*\.", re.DOTALL)  # no signatures, no tables
_HELD_OUT_OF = 20

ASKED = "textwrap.dedent"
"""The name that the model is asked for before and after; held out as others are."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A name such as `json.dumps`, and the first paragraph of its docstring in one line."""

    name: str
    answer: str

    @property
    def question(self) -> str:
        """What the user asks."""
        return f"What does {self.name} do in Python?"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns, as chat data has them."""
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]


def python_docs() -> tuple[list[Sample], list[Sample]]:
    """Return the samples to train on and those held out, modules mixed; `ASKED` is the first of the latter."""
    by_answer: dict[str, Sample] = {}
    for module in _MODULES.split():
        for sample in _of_module(module):
            by_answer.setdefault(sample.answer, sample)
    mixed = sorted(by_answer.values(), key=lambda sample: _digest(sample.name))
    held_out = [sample for sample in mixed if _is_held_out(sample.name)]
    held_out.sort(key=lambda sample: sample.name != ASKED)
    return [sample for sample in mixed if not _is_held_out(sample.name)], held_out


def write(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples as JSONL."""
    lines = [json.dumps({"messages": sample.messages}, ensure_ascii=False) for sample in samples]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _is_held_out(name: str) -> bool:
    return name == ASKED or _digest(name)[0] % _HELD_OUT_OF == 0


def _of_module(name: str) -> Iterator[Sample]:
    """Yield what the functions, classes and methods of a module say; nothing where this Python lacks it."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return
    for member, found in sorted(vars(module).items()):
        if member.startswith("_") or not _belongs(found, module):
            continue
        yield from _of_object(f"{name}.{member}", found)
        if inspect.isclass(found):
            for method, function in sorted(vars(found).items()):
                if not method.startswith("_") and inspect.isroutine(function):
                    yield from _of_object(f"{name}.{member}.{method}", function)


def _belongs(found: object, module: ModuleType) -> bool:
    """Return whether a module's member is a function or class of its own, or of the C module behind it."""
    if not inspect.isroutine(found) and not inspect.isclass(found):
        return False
    home = getattr(found, "__module__", None) or module.__name__
    return home.lstrip("_").partition(".")[0] == module.__name__.partition(".")[0]


def _of_object(name: str, found: object) -> Iterator[Sample]:
    text = getattr(found, "__doc__", None)
    if not isinstance(text, str):
        return
    paragraph = " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
    if _LEAST_CHARACTERS <= len(paragraph) <= _MOST_CHARACTERS and _SENTENCES.fullmatch(paragraph):
        yield Sample(name.removeprefix("builtins."), paragraph)
