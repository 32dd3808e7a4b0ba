"""Nothing that a person reads has a sentence of more than `MAX_WORDS` words: docstrings, comments, strings, pages.

A string is an error, a note or a help text; a value that is filled in counts as one word, and so does inline code.
Run: pytest tests/style, or python tests/style/test_sentences.py [WORDS] for a list of all that are longer than WORDS.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_WORDS = 30
ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "headrace").rglob("*.py"))
RECORDS = {"CHANGELOG.md"}  # one line an entry; docs/log and docs/decisions are records, too
PAGES = [path for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))) if path.name not in RECORDS]

_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+|\s*#+\s+|\s*>\s*")
_CODE = re.compile(r"(`+)(?:(?!\1).)+\1", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_URL = re.compile(r"https?://\S+")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|approx)\.")
_END = re.compile(r"(?<=[.!?:;])[)\"'*_\]]*\s+")
_CELLS = re.compile(r"(?<=\S) {3,}(?=\S)|\|")


def paragraphs(text: str, line: int, indented_is_code: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each paragraph, list item and table cell of `text`, without its blocks of code."""
    kept: list[str] = []
    begun, fenced, in_list = line, False, False
    for number, one in enumerate([*text.splitlines(), ""], line):
        fence = one.lstrip().startswith(("```", "~~~"))
        after_blank = not kept
        code = (
            fenced
            or fence
            or one.lstrip().startswith((">>>", "$ "))
            or (indented_is_code and one.startswith("    ") and after_blank and not in_list)
        )
        fenced ^= fence
        cells = _CELLS.split(one.strip())
        item = _ITEM.match(one)
        if kept and (code or not one.strip() or len(cells) > 1 or item):
            yield begun, " ".join(kept)
            kept = []
        if code or not one.strip():
            continue
        in_list = bool(item) or (in_list and one.startswith(" "))
        if len(cells) > 1:
            yield from ((number, cell) for cell in cells)
        else:
            begun = begun if kept else number
            kept.append(one.strip())


def sentences(text: str, line: int = 1, indented_is_code: bool = False) -> Iterator[tuple[int, str]]:
    """Yield each sentence of `text` with the line where its paragraph begins."""
    plain = _URL.sub("URL", _CODE.sub(lambda code: "CODE" + "\n" * code.group().count("\n"), text))
    for number, words in paragraphs(_LINK.sub(r"\1", plain), line, indented_is_code):
        for sentence in _END.split(_ABBREVIATION.sub(lambda each: each.group(1), words)):
            yield number, sentence


def length(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line; lines of comment below one another are one."""
    kept: list[str] = []
    begun = last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = not token.line[: token.start[1]].strip()
        if kept and not (alone and token.start[0] == last + 1):
            yield begun, "\n".join(kept)
            kept = []
        begun = begun if kept else token.start[0]
        kept.append(token.string.lstrip("#!:"))
        last = token.start[0] if alone else -1
    if kept:
        yield begun, "\n".join(kept)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield each string of a module with its line, docstrings too; values filled in are one word each."""
    tree = ast.parse(source)
    inside = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from sentences(source, indented_is_code=True)
        return
    for line, text in (*strings(source), *comment_blocks(source)):
        yield from sentences(text, line)


def too_long(path: Path, most: int = MAX_WORDS) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {length(sentence)} words: {' '.join(sentence.split()[:8])} ..."
        for line, sentence in texts_of(path)
        if length(sentence) > most
    ]


if __name__ == "__main__":
    full = len(sys.argv) > 2
    for each in (*MODULES, *PAGES):
        for line, sentence in texts_of(each):
            if length(sentence) > int(sys.argv[1]):
                print(f"{each.relative_to(ROOT)}:{line}: {length(sentence)}: {sentence}")
