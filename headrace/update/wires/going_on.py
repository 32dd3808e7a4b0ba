"""Training that goes on from an adapter: its files decide the settings that are not given.

Invariant: what is decided is said by the option itself, so a run that has begun never reads these files again.
"""

from pathlib import Path

from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.options.adapter import Lora, adapter_of
from headrace.terms.options.named import named_text, parse_named


def going_on(asked: str | None) -> str | None:
    """Return the option `adapter` with the settings of the adapter that it goes on from, if there is one.

    Raises:
        ConfigError: there is none, its settings differ from those that are given, or Headrace does not train such ones.
    """
    adapter = adapter_of(asked) if asked is not None else None
    if not isinstance(adapter, Lora) or adapter.from_ is None:
        return asked
    from headrace.model.adapters.adapter_config import AdapterConfig

    directory = Path(adapter.from_).absolute()
    try:
        config = AdapterConfig.read(directory)
        found = config.words()
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"adapter: from: {error}") from error
    name, given = parse_named("adapter", str(asked))
    if config.settings.name != name:
        raise ConfigError(f"adapter: {directory} is {config.settings.name}, and {name} is asked for; give the same")
    for key in ("rank", "alpha"):
        if given.get(key, found[key]) != found[key]:
            raise ConfigError(f"adapter: {key} {given[key]} is asked for, and {directory} has {found[key]}; leave {key} out")
    return named_text(name, found | given | {"from": str(directory)})
