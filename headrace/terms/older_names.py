"""Settings that are given by an older name are written into the option that says the same today (`Declaration.alias`)."""

from headrace.terms.declared import Declared
from headrace.terms.errors import ConfigError
from headrace.terms.named import named_text, parse_named


def read_older_names(options: Declared) -> None:
    """Write settings that were given by an older name into `optimizer`, which then says the same.

    Raises:
        ConfigError: they are of another rule, or `optimizer` has another value for one.
    """
    said: str = vars(options)["optimizer"]
    name, settings = parse_named("optimizer", said)
    for each in options.declarations():
        value = getattr(options, each.key)
        if not each.alias or value is None:
            continue
        rule, defaults = parse_named("optimizer", each.alias.removeprefix("optimizer: "))
        values = value if isinstance(value, tuple) else (value,)
        _, given = parse_named("optimizer", named_text(rule, dict(zip(defaults, map(str, values), strict=True))))
        chosen = {key: word for key, word in given.items() if word != defaults[key]}
        if chosen and rule != name:
            raise ConfigError(f"{each.key}: is a setting of {rule}, and the optimizer is {name}; leave it out")
        if rule == name and any(settings.get(key, word) != word for key, word in given.items()):
            raise ConfigError(f"{each.key}: {value} here, and {said!r} under optimizer; leave one of them out")
        settings |= chosen
        object.__setattr__(options, each.key, None)  # frozen: set once, here
    object.__setattr__(options, "optimizer", named_text(name, settings))
