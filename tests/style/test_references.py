"""What a page or a comment points to is there: links, files, decisions, pages of the log, names in scripts.

Each test names all that break its rule. Run: pytest tests/style
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs" / "log"
MOST_LINES_OF_A_PAGE = 40
TABLES = ("plans.md", "benchmarks.md")  # of the log: longer, made by scripts or gathered from the other pages
SOURCES = [path for folder in ("headrace", "tests", "bench", "demo") for path in sorted((ROOT / folder).rglob("*.py"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench" / "README.md"]
TEXTS = {path: path.read_text(encoding="utf-8") for path in SOURCES + PAGES if path != Path(__file__)}

_LINK = re.compile(r"\]\((?!https?:)([^)\s#]+)(?:#[^)]*)?\)")
_DECISION = re.compile(r"\bdecisions?[ /](\d{4})\b")
_LOG_PAGE = re.compile(r"\bdocs/log/([a-z0-9-]+)")
# Paths from the root, or inside the package without its name. What only looks like one has braces, stars or capitals in it.
_FILE = re.compile(r"(?<![\w/.~-])((?:headrace|tests|bench|demo|docs|[a-z_]+)/[\w/-]+\.(?:py|md|json|svg))\b")


def missing_links(text: str, folder: Path) -> list[str]:
    return [link for link in _LINK.findall(text) if not (folder / link).exists()]


def missing_files(text: str, folders: list[Path]) -> list[str]:
    """Return the files that `text` names by a path that begins with a folder of ours, and that are in none of `folders`."""
    return [
        name
        for name in _FILE.findall(text)
        if any((folder / name.split("/")[0]).is_dir() for folder in folders)
        and not any((folder / name).exists() for folder in folders)
    ]


# In docstrings: a file by its bare name, a member of a class, a module or a name of a package.
_BARE_FILE = re.compile(r"(?<![\w/*.`-])`?([a-z_]+\.py)\b")
_MEMBER = re.compile(r"`([A-Z]\w+)\.(\w+)")
_DOTTED = re.compile(r"`((?:[a-z_]+\.)+)(?!html|md|json)(\w+)(?=`)")


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def names_in_classes(trees: Mapping[Path, ast.Module]) -> dict[str, set[str]]:
    """Return by class what its body names: methods, fields, attributes; and those of its bases, `?` where one is not ours."""
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        inner = {
            getattr(each, "name", None) or getattr(each, "id", None) or getattr(each, "attr", "") for each in ast.walk(node)
        }
        own.setdefault(node.name, set()).update(inner)
        bases.setdefault(node.name, set()).update(ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
    roots = {"Protocol", "NamedTuple", "ABC", "Generic", "object"}
    for _ in range(8):  # no chain of classes is longer
        for name, above in bases.items():
            for base in above - roots:
                own[name] |= own.get(base, {"?"})
    return own


def stale_names(text: str, folder: Path, package: Path, classes: Mapping[str, set[str]]) -> list[str]:
    """Return what a docstring in `folder` names and is not there."""
    found = [name for name in _BARE_FILE.findall(text) if not (folder / name).exists()]
    found += [
        f"{name}.{member}" for name, member in _MEMBER.findall(text) if name in classes and not {member, "?"} & classes[name]
    ]
    for dotted, last in _DOTTED.findall(text):
        parts = dotted.rstrip(".").split(".")
        is_value = parts[0] == "plan" and not package.joinpath(*parts[:2], "__init__.py").exists()  # fields of a plan
        if (package / parts[0]).is_dir() and not is_value and last not in names_of(package.joinpath(*parts)):
            found.append(dotted + last)
    return found


def test_docstrings_name_what_is_there() -> None:
    package = ROOT / "headrace"
    trees = {path: ast.parse(TEXTS[path]) for path in SOURCES if package in path.parents}
    classes = names_in_classes(trees)
    found = [
        (str(path.relative_to(ROOT)), name)
        for path, tree in trees.items()
        for text in docstrings(tree)
        for name in stale_names(text, path.parent, package, classes)
    ]
    assert found == []


def test_stale_names_of_docstrings_are_seen() -> None:
    text = "See `step.py`, `gone.py`, `Kept.read`, `Kept.gone`, `flow.step.commit`, `flow.commit`, and `torch.nn.Linear`."
    found = stale_names(text, ROOT / "headrace" / "flow" / "step", ROOT / "headrace", {"Kept": {"read"}})
    assert found == ["gone.py", "Kept.gone", "flow.commit"]


def test_links_lead_somewhere() -> None:
    found = [(str(page.relative_to(ROOT)), link) for page in PAGES for link in missing_links(TEXTS[page], page.parent)]
    assert found == []


def test_files_that_are_named_are_there() -> None:
    found = []
    for path, text in TEXTS.items():
        shown = [ROOT, ROOT / "headrace", path.parent, path.parent.parent]
        found += [(str(path.relative_to(ROOT)), name) for name in missing_files(text, shown)]
    assert found == []


def test_no_page_or_message_installs_what_no_index_has() -> None:
    """Headrace comes by its clone, its extras by `pip install -e '.[NAME]'` there."""
    wrong = re.compile(r"install '?headrace\b")
    assert wrong.search("pip install headrace")
    assert wrong.search("pip install 'headrace[serve]'")
    texts = {path: text for path, text in TEXTS.items() if "tests" not in path.parts and path.name != "CHANGELOG.md"}
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if wrong.search(text)] == []


def test_decisions_that_are_cited_are_there() -> None:
    there = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")}
    found = [(str(path.relative_to(ROOT)), number) for path, text in TEXTS.items() for number in _DECISION.findall(text)]
    assert [(path, number) for path, number in found if number not in there] == []


def test_pages_of_the_log_that_are_cited_are_there() -> None:
    there = {path.stem for path in LOG.glob("*.md")} | {"README"}
    found = [(str(path.relative_to(ROOT)), name) for path, text in TEXTS.items() for name in _LOG_PAGE.findall(text)]
    assert [(path, name) for path, name in found if name not in there] == []
    assert "process-memory" in {name for _, name in found}, "the citations of the code are not seen"


def test_every_page_of_the_log_is_in_its_index_once_with_its_finding() -> None:
    index = (LOG / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[([a-z0-9-]+)\]\(\1\.md\): \S.+\.$", index, re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in LOG.glob("*.md") if path.name != "README.md")


def test_a_page_of_the_log_answers_one_question_in_forty_lines() -> None:
    wrong = []
    for path in LOG.glob("*.md"):
        lines = path.read_text(encoding="utf-8").splitlines()
        most = len(lines) if path.name in TABLES else MOST_LINES_OF_A_PAGE
        if path.name != "README.md" and (len(lines) > most or not re.fullmatch(r"# .+\?", lines[0])):
            wrong.append(path.name)
    assert wrong == []


def names_of(place: Path) -> set[str]:
    """Return what can be imported from a module or package (its path without suffix): its names, its files and folders."""
    names = {each.stem for each in place.iterdir()} if place.is_dir() else set()
    module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8") if module.exists() else "")):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def unknown_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of what is imported of the package and is not there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module is None or node.module.split(".")[0] != "headrace":
            continue
        there = names_of(ROOT.joinpath(*node.module.split(".")))
        yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names if alias.name not in there)


def test_scripts_import_what_is_there() -> None:
    """Nobody runs some of them for weeks, and types are not checked in all."""
    scripts = [path for path in SOURCES if path.parts[len(ROOT.parts)] in ("bench", "demo")]
    found = [(path.name, *each) for path in scripts for each in unknown_names(ast.parse(TEXTS[path]))]
    assert found == []


def test_what_leads_nowhere_is_seen() -> None:
    assert missing_links("[a](README.md) [b](docs/none.md#part) [c](https://x.y/z.md)", ROOT) == ["docs/none.md"]
    named = "`headrace/flow/step/step.py`, flow/none.py, docs/design.md, /proc/self/none.md, other/place.py"
    assert missing_files(named, [ROOT, ROOT / "headrace"]) == ["flow/none.py", "docs/design.md"]
    wrong = ast.parse("from headrace import Options, AdamW\nfrom headrace.none import x\nfrom headrace.plan import search")
    assert [name for _, name in unknown_names(wrong)] == ["headrace.AdamW", "headrace.none.x"]


def test_the_changelog_says_each_thing_in_one_line() -> None:
    lines = TEXTS[ROOT / "CHANGELOG.md"].split("\n## ", 1)[1].splitlines()[1:]
    assert [line for line in lines if line and not line.startswith(("- ", "## ", "### "))] == [], "entries of several lines"
    assert [line for line in lines if len(line) > 160] == []
