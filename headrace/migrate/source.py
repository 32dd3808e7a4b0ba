"""The file of another trainer while it is translated: each of its keys is taken once, and becomes an option or a reason."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import Declaration
from headrace.terms.options.run_options import RunOptions

_OPTIONS: dict[str, Declaration] = {each.key: each for each in RunOptions.declarations()}


@dataclass
class MigratedFile:
    """The `values` of a file; `options` are what became of them, `origins` from which keys, `left_out` are reasons by key, and
    `notes` say what a person should look at. A command line names a `trainer`, and may say how many `processes` train.
    """

    values: Mapping[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    trainer: str | None = None
    processes: int | None = None
    _taken: set[str] = field(default_factory=set)

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which then counts as dealt with; `default` if it is missing or empty."""
        self._taken.add(key)
        value = self.values.get(key)
        return default if value is None or value == "auto" else value

    def has(self, key: str) -> bool:
        """Return whether the file gives the key a value."""
        return self.values.get(key) not in (None, "auto", "", [], {})

    def set(self, option: str, value: Any, origin: str) -> None:
        """Give an option a value that comes from the keys named in `origin`. What this version cannot take is left out."""
        declared = _OPTIONS.get(option)
        if declared is None:
            self.leave(origin, "there is no such option yet")
            return
        try:
            declared.read(value)
        except ConfigError as error:
            self.leave(origin, str(error))
            return
        self.options[option], self.origins[option] = value, origin

    def leave(self, key: str, reason: str) -> None:
        """Say why a key has no counterpart."""
        self._taken.add(key)
        self.left_out[key] = reason

    def rename(self, key: str, option: str, convert: Callable[[Any], Any] = lambda value: value) -> None:
        """Take a key for an option that means the same."""
        value = self.take(key)
        if value is not None:
            self.set(option, convert(value), key)

    def close(self, inner: "MigratedFile", place: str, reasons: Mapping[str, str]) -> None:
        """Name the keys that are left of `inner`, an object of the file that stands at `place`."""
        inner.finish(reasons)
        for key, reason in inner.left_out.items():
            self.leave(f"{place}.{key}", reason)
        self.notes += inner.notes

    def finish(self, reasons: Mapping[str, str]) -> None:
        """Name all keys that are left: `reasons` by key, or by the beginning of a key that ends with `*`.

        Origins that are not in the file are the trainer's defaults.
        """
        for option, origin in self.origins.items():
            if not any(key in self.values for key in origin.split(", ")):
                self.origins[option] = f"{origin} (default)"
        for key, value in self.values.items():
            if key in self._taken:
                continue
            reason = reasons.get(key) or next(
                (words for begins, words in reasons.items() if begins.endswith("*") and key.startswith(begins[:-1])), None
            )
            if reason is None and value in (None, False, "", [], {}):
                continue  # an unknown switch that is off changes nothing
            self.leave(key, reason or "unknown to this version")


def one_reason(reason: str, keys: str) -> dict[str, str]:
    """Return one reason for all `keys`, with blanks between them."""
    return dict.fromkeys(keys.split(), reason)


def refuse(key: str, value: Any, what: str) -> ConfigError:
    """Return the refusal of what would train something else than the file asks for."""
    return ConfigError(f"{key}: {value!r} {what}")
