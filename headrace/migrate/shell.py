"""Reads the commands of a shell script without running any: words with quotes, comments, and variables that it sets itself.

Invariant: words are those that the shell would give to the program. What has no such words here (loops, conditions, functions,
arrays, outputs of commands, patterns, variables from outside) is refused by its line.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.terms.errors import ConfigError

_PIECE = re.compile(
    r"""
    (?P<joined>\\\n)
    | \\(?P<escaped>.)
    | '(?P<single>[^']*)'
    | "(?P<double>(?:[^"\\]|\\.)*)"
    | \$\{(?P<braced>[^{}]*)\}
    | \$(?P<name>[A-Za-z_]\w*)
    | (?P<comment>\#[^\n]*)
    | (?P<redirect>(?:\d|&)?>[>|]?(?:&\d)?|\d?<(?![<(]))
    | (?P<operator>\n|&&|\|\||\|&|[|;&])
    | (?P<blank>[ \t]+)
    | (?P<plain>[^\s\\'"$`;&|<>()\#]+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_WITHIN_QUOTES = re.compile(
    r'\\(?P<escaped>[$`"\\\n])|\$\{(?P<braced>[^{}]*)\}|\$(?P<name>[A-Za-z_]\w*)|(?P<other>\$[({@*#?$!\d-]|`)'
)
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DEFAULT = re.compile(r"([A-Za-z_]\w*|\d)(:?[-=])(.*)", re.DOTALL)
_SYNTAX = re.compile(
    r"if|then|else|elif|fi|for|while|until|do|done|case|esac|select|function|eval|[{}!]|\[\[?|test|unset|shift"
)
_DECLARES = ("export", "declare", "typeset", "readonly", "local")
_HARMLESS = ("true", ":", "exit", "echo", "return")  # after `||`


@dataclass(frozen=True, slots=True)
class Command:
    """The `words` of one command, the variables of the environment that the script gives it, and the line where it begins."""

    words: tuple[str, ...]
    environment: dict[str, str]
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {' '.join(self.words[:3])}{' ...' if len(self.words) > 3 else ''}"


def commands_of(text: str) -> tuple[list[Command], list[str]]:
    """Return the commands of a script as they would run, and notes about values that its caller may change.

    Raises:
        ConfigError: it has syntax that is not read.
    """
    reader = _Reader(text.replace("\r\n", "\n"))
    return list(reader.commands()), reader.notes


@dataclass
class _Reader:
    """One pass over `text`. `names` are the variables by now, `word` is the text of the one that is read, None between two."""

    text: str
    names: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)  # assignments before the command's name
    word: str | None = None
    assigned: tuple[str, bool] | None = None  # the name that the word gives a value, and whether it adds to it
    bare: bool = True  # nothing of the word is quoted
    drops: bool = False  # the next word names a file of a redirection
    place: int = 0
    begins: int = 0

    def commands(self) -> Iterator[Command]:
        """Yield the commands up to the end or an `exit`."""
        before = "\n"
        for piece in self._pieces():
            kind, value = str(piece.lastgroup), piece[str(piece.lastgroup)]
            if kind == "operator":
                self._end_word()
                found = self._end_command(before)
                if found and found.words[0] == "exit" and before in ("\n", ";"):
                    return
                before = value
                if found:
                    yield found
            elif kind in ("blank", "redirect"):
                self._end_word()
                self.drops = self.drops or (kind == "redirect" and not value[-1].isdigit())
            elif kind not in ("comment", "joined"):
                self._add(kind, value)

    def _pieces(self) -> Iterator[re.Match[str]]:
        text = self.text + "\n\n"
        while piece := _PIECE.match(text, self.place):
            if piece.lastgroup == "comment" and self.word is not None:  # in a word it is a character
                self._append("#")
                self.place += 1
                continue
            if self.word is None and not self.words and not self.given:
                self.begins = self.place
            yield piece
            self.place = piece.end()

    def _add(self, kind: str, value: str) -> None:
        """Add a piece to the word."""
        if kind == "plain":
            self._add_plain(value)
        elif kind == "single":
            self._append(value, quoted=True)
        elif kind == "double":
            self._append(_WITHIN_QUOTES.sub(self._within_quotes, value), quoted=True)
        elif kind == "escaped":
            self._append(value, quoted=True)
        elif kind in ("name", "braced"):
            self._add_split(self._value(value))
        elif value == "$" and self.text[self.place + 1 : self.place + 2] in ("", " ", "\n", "/", "."):
            self._append(value)
        else:
            raise self._refused(self.text[self.place : self.place + 2].strip(), "is shell that is not read")

    def _add_plain(self, value: str) -> None:
        declares = bool(self.words) and self.words[0] in _DECLARES
        found = _ASSIGNED.match(value) if self.word is None and (declares or not self.words) else None
        if found:
            self.assigned, self.word = (found[1], bool(found[2])), ""
            value = value[found.end() :]
        if not self.assigned and (set(value) & set("*?") or re.search(r"\{[^}]*(,|\.\.)[^}]*\}", value)):
            raise self._refused(value, "is a pattern that the shell expands; write the names")
        if value[:1] == "~" and not self.word:
            value = self._value("HOME") + value[1:]
        if value or not found:
            self._append(value)

    def _append(self, text: str, *, quoted: bool = False) -> None:
        self.word = (self.word or "") + text
        self.bare = self.bare and not quoted

    def _add_split(self, value: str) -> None:
        """Add the value of a variable outside of quotes: its blanks part words, except in an assignment."""
        if self.assigned:
            self._append(value)
            return
        for number, part in enumerate(re.split(r"\s+", value)):
            if number:
                self._end_word()
            if part:
                self._append(part, quoted=True)

    def _within_quotes(self, piece: re.Match[str]) -> str:
        kind = str(piece.lastgroup)
        if kind == "escaped":
            return piece[kind].strip("\n")
        if kind == "other":
            raise self._refused(piece[0], "is shell that is not read")
        return self._value(piece[kind])

    def _value(self, name: str) -> str:
        """Return what stands for a variable, or the default that is written with it."""
        if found := _DEFAULT.fullmatch(name):
            name, how, default = found.groups()
            known = self._known().get(name)
            if known is None or (not known and how[0] == ":"):
                if set(default) & set("\"'") and not (self.assigned and re.fullmatch(r"""(["'])[^"']*\1""", default)):
                    raise self._refused(f"${{{found[0]}}}", "is shell that is not read; set the variable before")
                known = _WITHIN_QUOTES.sub(self._within_quotes, default.strip("\"'"))
                self.notes.append(f"line {self._line()}: {name} is taken as {known!r}, which its caller may change")
                if how.endswith("="):
                    self.names[name] = known
            return known
        if not re.fullmatch(r"\w+", name):
            raise self._refused(f"${{{name}}}", "is shell that is not read")
        if name not in self._known():
            raise self._refused(f"${name}", "is not set before by the file; write its value")
        return self._known()[name]

    def _known(self) -> dict[str, str]:
        """Return the variables; one assignment sees those before it on its line, a command's words do not."""
        return self.names | self.given if self.assigned and not self.words else self.names

    def _end_word(self) -> None:
        word, assigned, bare = self.word, self.assigned, self.bare
        self.word, self.assigned, self.bare = None, None, True
        if word is None:
            return
        if self.drops:
            self.drops = False
        elif assigned:
            name, adds = assigned
            self.given[name] = (self.names | self.given).get(name, "") + word if adds else word
        else:
            if not self.words and bare and _SYNTAX.fullmatch(word):
                raise self._refused(word, "is shell that is not read; leave the command alone in the file")
            self.words.append(word)

    def _end_command(self, before: str) -> Command | None:
        """Return the command that ends here, which stands behind the operator `before`; None for nothing or variables alone."""
        words, given = tuple(self.words), dict(self.given)
        self.words, self.given, self.drops = [], {}, False
        if not words:
            if given and before in ("&&", "||"):
                raise self._refused(next(iter(given)), "is set under a condition; set it on a line of its own")
            self.names |= given
            return None
        if words[0].startswith("-"):
            raise self._refused(words[0], "begins a command: the line before it does not end with a backslash")
        if before == "||" and words[0] not in _HARMLESS:
            raise self._refused(words[0], "runs only if another command fails; leave one of them")
        if words[0] in _DECLARES:
            self.names |= given
            self.exported |= {*words[1:], *given} if words[0] == "export" or "-x" in words else set()
        environment = {name: self.names[name] for name in sorted(self.exported) if name in self.names} | given
        return Command(words, environment, self._line())

    def _line(self) -> int:
        return self.text.count("\n", 0, self.begins) + 1

    def _refused(self, what: str, why: str) -> ConfigError:
        return ConfigError(f"line {self._line()}: {what!r} {why}")
