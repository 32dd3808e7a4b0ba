"""No sentence that a person reads has more than `MAX_WORDS` words: in docstrings, comments, strings of the package, pages.

Strings are errors, notes and help texts. Inline code counts as one word, and so does each value that is filled in.
Run: pytest tests/style. A list of all sentences above 25 words: python tests/style/test_sentences.py 25
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

MAX_WORDS = 30
ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "headrace").rglob("*.py"))
LEFT_OUT = {"CHANGELOG.md"}  # a record, as docs/log and docs/decisions are
PAGES = [path for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))) if path.name not in LEFT_OUT]

_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+|\s*#+\s+|\s*>\s*")
_CODE = re.compile(r"(`+)(?:(?!\1).)+\1", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_URL = re.compile(r"https?://\S+")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|al|approx)\.")
_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+")
_CELLS = re.compile(r"(?<=\S) {3,}(?=\S)|\|")


def paragraphs(text: str, line: int, indented_is_code: bool) -> Iterator[tuple[int, str]]:
    """Yield the line and the words of each paragraph, list item and table cell of `text`, without its blocks of code."""
    kept: list[str] = []
    begun, fenced, in_code, in_list = line, False, False, False
    for number, one in enumerate([*text.splitlines(), ""], line):
        fence = one.lstrip().startswith(("```", "~~~"))
        item = _ITEM.match(one)
        in_code = indented_is_code and one.startswith("    ") and not in_list and (in_code or not kept)
        skipped = fenced or fence or in_code or not one.strip()
        fenced ^= fence
        cells = _CELLS.split(one.strip())
        if kept and (skipped or item or len(cells) > 1):
            yield begun, " ".join(kept)
            kept = []
        if skipped:
            continue
        in_list = (bool(item) and not one.startswith("#")) or (in_list and one.startswith(" "))
        if len(cells) > 1:
            yield from ((number, cell) for cell in cells)
        else:
            begun = begun if kept else number
            kept.append(one.strip())


def sentences(text: str, line: int = 1, indented_is_code: bool = False) -> Iterator[tuple[int, str]]:
    """Yield each sentence of `text`, with the line where its paragraph begins."""
    plain = _CODE.sub(lambda code: "CODE" + "\n" * code.group().count("\n"), text) if "```" not in text else text
    for number, words in paragraphs(_LINK.sub(r"\1", _URL.sub("URL", plain)), line, indented_is_code):
        for sentence in _END.split(_ABBREVIATION.sub(r"\1", _CODE.sub("CODE", words))):
            yield number, sentence


def length(sentence: str) -> int:
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line; lines of comment below one another are one."""
    kept: list[str] = []
    begun = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = not token.line[: token.start[1]].strip()
        if kept and not (alone and token.start[0] == last + 1):
            yield begun, "\n".join(kept)
            kept = []
        begun = begun if kept else token.start[0]
        kept.append(token.string.lstrip("#!:"))
        last = token.start[0] if alone else 0
    if kept:
        yield begun, "\n".join(kept)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield each string of a module with its line, docstrings too; values filled in are one word each."""
    nodes = list(ast.walk(ast.parse(source)))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and id(node) not in inside:
            yield node.lineno, node.value


def sentences_of(path: Path) -> Iterator[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from sentences(text, indented_is_code=True)
        return
    for line, words in (*strings(text), *comments(text)):
        yield from sentences(words, line)


def longer_than(most: int) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {length(sentence)} words: {' '.join(sentence.split()[:8])} ..."
        for path in (*MODULES, *PAGES)
        for line, sentence in sentences_of(path)
        if length(sentence) > most
    ]


def test_no_sentence_is_too_long() -> None:
    assert longer_than(MAX_WORDS) == []


def test_what_ends_a_sentence_and_what_is_left_out() -> None:
    page = """# Title

    code below a title

One two `inline code of many words` three (e.g. four) five. Six: [seven](a-link.md); eight!

    code in a block does not count

- nine ten
  eleven
  - twelve

| a cell | another cell. And one more |
|---|---|

```python
nor does this one
```
Thirteen
fourteen? https://example.org/a/b/c
"""
    found = [(line, length(each)) for line, each in sentences(page, indented_is_code=True) if length(each)]
    assert found == [(1, 1), (5, 7), (5, 3), (9, 3), (11, 1), (13, 2), (13, 2), (13, 3), (19, 2), (19, 1)]


def test_docstrings_comments_and_strings_are_read() -> None:
    source = '''"""A module."""
# One two
# three. Four
def work(x):  # five six
    """Seven eight {x}."""
    raise ValueError(f"nine {x} ten " "eleven")
'''
    read = [(line, length(each)) for line, text in (*strings(source), *comments(source)) for _, each in sentences(text, line)]
    assert sorted(read) == [(1, 2), (2, 1), (2, 3), (4, 2), (5, 3), (6, 4)]


if __name__ == "__main__":
    print("\n".join(longer_than(int(sys.argv[1]))))
