"""What the value of an option may be: each kind reads it as a YAML file, a command line or a program gives it.

Invariant: what a kind returns is valid, and reading it again returns an equal value. Errors name the key, what was
expected, and what was found.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import date
from os.path import expanduser
from pathlib import Path
from typing import Any, ClassVar

from headrace.terms.errors import ConfigError
from headrace.terms.sizes import MOST_COUNT, parse_bytes

_MOST_SHOWN_LETTERS = 120
Schema = dict[str, Any]


class OptionKind:
    """One kind. `cli` is the type that the command line reads a value as, None where it cannot be given there.

    `takes_mapping`: a mapping is one value, also where a list of them may stand.
    """

    cli: ClassVar[Any] = str
    takes_mapping: ClassVar[bool] = False

    def read(self, value: Any, key: str) -> Any:
        """Return the value of `key`, checked; ConfigError says what was expected and found."""
        raise NotImplementedError

    def schema(self) -> Schema:
        """Return the JSON schema of values as people write them into a YAML file; `read` may take further forms."""
        return {"type": "string"}


@dataclass(frozen=True)
class Number(OptionKind):
    """A finite number of at least `least` (more than it, if `above`) and at most `most` (less than it, if `below`)."""

    least: float = 0.0
    most: float = math.inf
    above: bool = False
    below: bool = False
    cli: ClassVar[Any] = float

    def read(self, value: Any, key: str) -> float:
        """Return the number."""
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        fits = number > self.least if self.above else number >= self.least
        fits = fits and (number < self.most if self.below else number <= self.most)
        if not (fits and math.isfinite(number)):
            most = f" and {'<' if self.below else '<='} {self.most:.0f}" if self.most < math.inf else ""
            raise _wrong(key, f"a number {'>' if self.above else '>='} {self.least:g}{most}", value)
        return number

    def schema(self) -> Schema:
        """Return the JSON schema."""
        limits: Schema = {"exclusiveMinimum" if self.above else "minimum": self.least}
        if self.most < math.inf:
            limits["exclusiveMaximum" if self.below else "maximum"] = self.most
        return {"type": "number", **limits}


@dataclass(frozen=True)
class NumberOr(OptionKind):
    """A number as `number` reads it, or the `word`."""

    number: Number
    word: str

    def read(self, value: Any, key: str) -> float | str:
        """Return the number or the word."""
        if value == self.word:
            return self.word
        try:
            return self.number.read(value, key)
        except ConfigError as error:
            raise ConfigError(f"{error}; or give {self.word}") from None

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"anyOf": [self.number.schema(), {"const": self.word}]}


@dataclass(frozen=True)
class Whole(OptionKind):
    """A whole number from `least` to `most`."""

    least: int = 1
    most: int = MOST_COUNT
    cli: ClassVar[Any] = int

    def read(self, value: Any, key: str) -> int:
        """Return the number."""
        number = None
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif isinstance(value, str | float) and len(str(value)) < _MOST_SHOWN_LETTERS:
            try:
                number = int(value) if int(value) == float(value) else None
            except (ValueError, OverflowError):
                number = None
        if number is None or not self.least <= number <= self.most:
            raise _wrong(key, f"a whole number from {self.least} to {self.most}", value)
        return number

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"type": "integer", "minimum": self.least, "maximum": self.most}


@dataclass(frozen=True)
class Span(OptionKind):
    """A whole number `N` up to `most`, or a span `MIN:MAX`; a span of one number is that number."""

    most: int = MOST_COUNT

    def read(self, value: Any, key: str) -> int | str:
        """Return the number, or the span as text."""
        words = str(value).split(":") if isinstance(value, int | str) and not isinstance(value, bool) else []
        try:
            low, high = (Whole(1, self.most).read(word, key) for word in (words[0], words[-1]))
        except (ConfigError, IndexError):
            low, high = 1, 0
        if len(words) > 2 or low > high:
            raise _wrong(key, f"a whole number from 1 to {self.most}, or MIN:MAX", value)
        return low if low == high else f"{low}:{high}"

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"anyOf": [Whole(1, self.most).schema(), {"type": "string", "pattern": "^[0-9]+(:[0-9]+)?$"}]}


class Flag(OptionKind):
    """Yes or no."""

    cli: ClassVar[Any] = bool
    _WORDS: ClassVar = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

    def read(self, value: Any, key: str) -> bool:
        """Return whether it is yes."""
        found = self._WORDS.get(shown(value).strip("'").lower())
        if found is None:
            raise _wrong(key, "true or false", value)
        return found

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"type": "boolean"}


@dataclass(frozen=True)
class OneOf(OptionKind):
    """One of `names`; `others` maps further names that people use to these."""

    names: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)

    def read(self, value: Any, key: str) -> str:
        """Return the name."""
        name = self.others.get(value, value) if isinstance(value, str) else None
        if name not in self.names:
            raise _wrong(key, " or ".join(part for part in (", ".join(self.names[:-1]), self.names[-1]) if part), value)
        return str(name)

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"enum": [*self.names, *self.others]}


@dataclass(frozen=True)
class Size(OptionKind):
    """Bytes: `16GiB` and the like, or a number; 0 only if `or_none`."""

    or_none: bool = False

    def read(self, value: Any, key: str) -> int:
        """Return the number of bytes."""
        return 0 if self.or_none and str(value) == "0" else parse_bytes(value, name=key)

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"type": ["integer", "string"]}


class Duration(OptionKind):
    """Seconds, above 0: `30m`, `90s`, `2h`, or a number of seconds."""

    _SECONDS: ClassVar = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

    def read(self, value: Any, key: str) -> float:
        """Return the seconds."""
        text = shown(value).strip("'").lower().replace(" ", "")
        number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        factor = self._SECONDS.get(text[len(number) :])
        try:
            seconds = math.nan if factor is None or isinstance(value, bool) else float(number) * factor
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise _wrong(key, "a time such as 30m, 90s or 2h", value)
        return seconds

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"type": ["number", "string"]}


class Rate(OptionKind):
    """Bytes per second: `100Gbit`, `12.5GB`, or a number."""

    _BITS: ClassVar = re.compile(r"^\s*(?P<number>[0-9.]+(?:e[0-9]+)?)\s*(?P<factor>[kmgt]?)bit(?:/s|ps)?\s*$", re.IGNORECASE)
    _FACTORS: ClassVar = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

    def read(self, value: Any, key: str) -> float:
        """Return the bytes per second."""
        match = self._BITS.match(value) if isinstance(value, str) else None
        if match is not None:
            try:
                bits = float(match["number"]) * self._FACTORS[match["factor"].lower()]
            except ValueError:
                bits = math.nan
            if math.isfinite(bits) and bits > 0:
                return bits / 8
        if isinstance(value, str):
            value = value.strip().removesuffix("/s")
        elif isinstance(value, float) and math.isfinite(value) and value > 0:
            return value
        try:
            return float(parse_bytes(value, name=key))
        except ConfigError as error:
            raise _wrong(key, "a rate such as 100Gbit or 12.5GB (a second)", value) from error

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"type": ["number", "string"]}


class Day(OptionKind):
    """A day, as YYYY-MM-DD."""

    def read(self, value: Any, key: str) -> str:
        """Return the day."""
        try:
            if isinstance(value, date) or (isinstance(value, str) and len(value) == 10):  # YAML has days of its own
                return date.fromisoformat(str(value)).isoformat()
        except ValueError:
            pass
        raise _wrong(key, "a day as YYYY-MM-DD", value)

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}


class PathOf(OptionKind):
    """A file or a directory; `~` stands for the user's own."""

    cli: ClassVar[Any] = Path

    def read(self, value: Any, key: str) -> Path:
        """Return the path."""
        if not isinstance(value, str | Path):
            raise _wrong(key, "a path", value)
        return Path(expanduser(value))


class Text(OptionKind):
    """A name."""

    def read(self, value: Any, key: str) -> str:
        """Return the text."""
        if not isinstance(value, str | Path):
            raise _wrong(key, "a text", value)
        return str(value)


class PlaceOrName(Text):
    """A name that may be a path, too; `~` stands for the user's own directory."""

    def read(self, value: Any, key: str) -> str:
        """Return the text."""
        return expanduser(super().read(value, key))


@dataclass(frozen=True)
class Listed(OptionKind):
    """Several values of a kind, from `least` to `most` of them; a value that is no list counts as a list of one."""

    of: OptionKind
    least: int = 0
    most: int | None = None

    @property
    def cli(self) -> Any:
        """A list of what one of them is read as."""
        return list[self.of.cli]  # type: ignore[name-defined]

    def read(self, value: Any, key: str) -> tuple[Any, ...]:
        """Return the values."""
        if isinstance(value, str | Path | int | float) or (self.of.takes_mapping and isinstance(value, Mapping)):
            return (self.of.read(value, key),)
        if not isinstance(value, list | tuple) or len(value) < self.least or len(value) > (self.most or len(value)):
            many = f" of {self.least}{'' if self.most else ' or more'}" if self.least else ""
            raise _wrong(key, f"a list{many}", value)
        return tuple(self.of.read(each, f"{key}.{number}") for number, each in enumerate(value))

    def schema(self) -> Schema:
        """Return the JSON schema."""
        one, most = self.of.schema(), {} if self.most is None else {"maxItems": self.most}
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": self.least, **most}]}


@dataclass(frozen=True)
class RecordOf(OptionKind):
    """A value of the class `of`, or a mapping of its fields."""

    of: type
    cli: ClassVar[Any] = None

    def read(self, value: Any, key: str) -> Any:
        """Return the value."""
        if isinstance(value, self.of):
            return value
        try:
            if isinstance(value, Mapping):
                return self.of(**value)
        except TypeError:
            pass
        except ConfigError as error:
            raise ConfigError(f"{key}.{error}") from error
        raise _wrong(key, f"a mapping with keys of {', '.join(each.name for each in fields(self.of))}", value)

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"type": "object", "properties": {each.name: {} for each in fields(self.of)}, "additionalProperties": False}


@dataclass(frozen=True)
class Either(OptionKind):
    """A value of the class `of` (or the JSON object that its `from_json` reads), or what `other` reads."""

    of: Any
    other: OptionKind

    @property
    def cli(self) -> Any:
        """What the other is read as."""
        return self.other.cli

    def read(self, value: Any, key: str) -> Any:
        """Return the value."""
        if isinstance(value, self.of):
            return value
        return self.of.from_json(value) if isinstance(value, dict) else self.other.read(value, key)

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"anyOf": [{"type": "object"}, self.other.schema()]}


def _wrong(key: str, expected: str, value: object) -> ConfigError:
    return ConfigError(f"{key}: expected {expected}, found {shown(value)}")


def shown(value: object) -> str:
    """Return `value` as an error shows it: whole, unless that fills the screen."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to write a number of more than some thousand digits
        return "a number of thousands of digits"
    half = _MOST_SHOWN_LETTERS // 2
    return text if len(text) <= _MOST_SHOWN_LETTERS else f"{text[:half]}...{text[-half:]}"
