"""Options that exclude each other, each refused with both names."""

from headrace.terms.declared import Declared
from headrace.terms.errors import ConfigError
from headrace.terms.optimizer import ALL
from headrace.terms.summing import TREE


def refuse_contradictions(options: Declared) -> None:
    """See that no two options contradict one another.

    Raises:
        ConfigError: two do; names both.
    """
    given = vars(options)
    if given["adapter"] is not None:
        refuse_adapters_and_parts(given["train"])
    if given["compile_blocks"] and given["adapter"]:
        raise ConfigError("compile_blocks and adapter: adapters run beside the blocks' own code; give one of them")
    if given["compile_blocks"] and given["liger"]:
        raise ConfigError("compile_blocks and liger: both fuse the same operators of a block; give one of them")
    if given["gradient_sum"] == TREE and given["gradient"] != "dense":
        raise ConfigError(
            f"gradient_sum: tree adds whole gradients, but gradient is {given['gradient']}; leave one of them out"
        )


def refuse_adapters_and_parts(train: str) -> None:
    """Refuse to train adapters and parts of a model's own parameters."""
    if train != ALL:
        raise ConfigError(f"train: {train} and adapter: adapters are trained, and everything else is frozen; give one of them")
