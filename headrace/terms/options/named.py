"""One form for everything with a name and settings (rules, gradients, adapters): NAME:KEY=VALUE,KEY=VALUE."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import Declaration, Declared

_Kind = TypeVar("_Kind", bound="Named")

# Other names for one with certain settings. With such a name these settings cannot be given otherwise.
OTHER_NAMES: Mapping[str, tuple[str, Mapping[str, str]]] = {"adamw8bit": ("adamw", {"moments": "int8"})}


class Named(Declared):
    """Base of what has a name and settings: the fields of a subclass, declared as options are."""

    name: ClassVar[str] = ""
    """What the user calls it."""

    @classmethod
    def settings(cls) -> tuple[Declaration, ...]:
        """Return the declarations of its own settings."""
        return cls.declarations()

    @property
    def text(self) -> str:
        """The name and those settings that have another value than their default, as the user gives them."""
        found = {each.word: getattr(self, each.key) for each in self.settings() if getattr(self, each.key) != each.default}
        return named_text(self.name, {key: plain_number(str(value)) for key, value in found.items()})


def read_named(option: str, text: str, kinds: Iterable[type[_Kind]], **given: Any) -> _Kind:
    """Return the one of `kinds` that `text` names, with its settings; `given` are values that the text may replace.

    Raises:
        ConfigError: there is no such kind, or it has no such setting or value; the message names those that it has.
    """
    name, settings = parse_named(option, text)
    by_name = {kind.name: kind for kind in kinds}
    if name not in by_name:
        raise ConfigError(f"{option}: {name!r} is not one of {', '.join(by_name)}")
    known = {each.word: each.key for each in by_name[name].settings()}
    for key in settings:
        if key not in known:
            has = f"has the settings {', '.join(known)}" if known else "has none"
            raise ConfigError(f"{option}: {key!r} is no setting of {name}, which {has}")
    try:
        return by_name[name](**given | {known[word]: value for word, value in settings.items()})
    except ConfigError as error:
        raise ConfigError(f"{option}: {name}: {error}") from error


def parse_named(option: str, text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the settings, still as words, that `text` says: `sgd`, or `sgd:KEY=VALUE,KEY=VALUE`.

    It does not know which names and settings there are, except `OTHER_NAMES`. Equal numbers become equal words.

    Raises:
        ConfigError: a setting without a value, or one that is given twice.
    """
    name, colon, rest = text.partition(":")
    name, implied = OTHER_NAMES.get(name.strip(), (name.strip(), {}))
    settings = dict(implied)
    for word in rest.split(",") if colon else ():
        key, equals, value = (each.strip() for each in word.partition("="))
        if not (key and equals and value) or key in settings:
            wrong = "stands twice" if key in settings else "has no value"
            raise ConfigError(f"{option}: in {text!r} the setting {key!r} {wrong}; expected NAME or NAME:KEY=VALUE,KEY=VALUE")
        settings[key] = plain_number(value)
    return name, settings


def named_text(name: str, settings: Mapping[str, str]) -> str:
    """Return what `parse_named` reads back to the same name and settings."""
    words = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"{name}:{words}" if words else name


def plain_number(text: str) -> str:
    """Return a number as Python writes it, so that equal settings are equal words; other text stays as it is."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else repr(number)
