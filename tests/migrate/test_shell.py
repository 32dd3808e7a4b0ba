"""A script's words are those that the shell gives to its programs; what has no such words here is refused by its line."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.migrate.shell import commands_of
from headrace.terms.errors import ConfigError

TEXTS = {
    "quotes": """t a 'b  c' "d $ e" f\\ g\\\\ '$X' "\\$X \\"q\\"" \\$X '' "" x"y"'z'\n""",
    "lines": "t --a=b \\\n  --c 'd' \\\n# hidden\nt z#y #x\n\nt \"e\\\nf\" g\\\nh",
    "json": """t '{"a": 1, "b": [2]}' "{\\"a\\": 1}" """,
    "variables": 'A=1\nB=\'c  d\'\nC=" $A$B "\nt $A "$B" $B x${A}y$B-z $C"$C" \'$C\'\nD=\nt $D x "$D"',
    "assignments": "A=1 B=${A}2\nt $A$B\nA+=' 3'\nt $A \"$A\"\nA=9 t $A\nexport A=4 B\nt $A\nC=a=b\nt $C d=$A --e=$A",
    "defaults": 't ${C:-d} "${C:-q r}" ${E:=5} $E\nF=${G:-"x y"}\nt "$F"',
    "redirections": "t a > out 2>&1\nt b >>out c 2> err; t d &> out && t e < /dev/null &\nwait\nt f 2>&1 | cat",
    "conditions": "true || exit 1\nt a; exit 0; t b\n",
    "brackets": "t [a] {a} a{b}c '{x,y}' '*' \"?\"",
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_words_are_those_of_a_shell(name: str, tmp_path: Path) -> None:
    if not (bash := shutil.which("bash")):
        pytest.skip("there is no bash")
    (tmp_path / "t").write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> "$TOLD"; printf "\\1" >> "$TOLD"\n')
    (tmp_path / "t").chmod(0o755)
    told = tmp_path / "told"
    environment = {"TOLD": str(told), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([bash, "-c", TEXTS[name]], env=environment, cwd=tmp_path, capture_output=True, check=False, timeout=600)
    theirs = [tuple(line.split("\0")[:-1]) for line in told.read_text().split("\1")[:-1]]
    ours = [each.words[1:] for each in commands_of(TEXTS[name])[0] if each.words[0] == "t"]
    assert theirs
    assert sorted(ours) == sorted(theirs)  # what runs in the background may come later


@given(st.lists(st.text(st.characters(exclude_characters="\r\0", exclude_categories=("Cs",))), min_size=1))
def test_quoted_words_come_back(words: list[str]) -> None:
    (found,) = commands_of(f"t {shlex.join(words)}")[0]
    assert found.words[1:] == tuple(words)


@given(st.text("ab $'\"\\\n#=&|;<>(){}[]*?~-!1", max_size=30))
def test_any_text_is_read_or_refused_by_its_line(text: str) -> None:
    try:
        said = " ".join(f"line {each.line}" for each in commands_of(text)[0])
    except ConfigError as error:
        said = str(error)
    assert said.startswith("line ") or not said


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("for x in a; do t $x; done", "line 1: 'for'"),
        ("if true; then t; fi", "line 1: 'if'"),
        ("A=1\n\n[ -f x ] && t", r"line 3: '\['"),
        ("t $(date)", r"line 1: '\$\('"),
        ('t "`date`"', "line 1: '`'"),
        ("A=(a b)", "line 1: '\\(a'"),
        ("f() { t; }", "line 1: '\\(\\)'"),
        ("t <<END\nx\nEND", "line 1: '<<'"),
        ("t *.json", "line 1: '\\*.json' is a pattern"),
        ("t {a,b}", "line 1: '{a,b}' is a pattern"),
        ("t ~/x", r"line 1: '\$HOME' is not set before"),
        ("A=1\nt \\\n  $B", r"line 2: '\$B' is not set before by the file; write its value"),
        ('t "$@"', r"line 1: '\$@'"),
        ("t ${A/b/c}", r"line 1: '\$\{A/b/c\}'"),
        ("t 'a", 'line 1: "\'a"'),
        ("t a \\ \n --b c", "line 2: '--b' begins a command: the line before it does not end with a backslash"),
        ("t a \\\n# --b \\\n --c", "line 3: '--c' begins a command"),
        ("a || t b", "line 1: 't' runs only if another command fails"),
        ("a && B=1", "line 1: 'B' is set under a condition"),
    ],
)
def test_what_is_not_read_is_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"^{what}"):
        commands_of(text)
