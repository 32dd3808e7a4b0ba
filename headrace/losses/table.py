"""Which losses there are. A new one is a file and a row here."""

from collections.abc import Mapping

from headrace.losses.dpo import Dpo
from headrace.losses.grpo import Grpo
from headrace.losses.kto import Kto
from headrace.losses.loss import Loss
from headrace.losses.orpo import Orpo
from headrace.losses.simpo import Simpo
from headrace.terms.options.named import read_named

LOSSES: Mapping[str, type[Loss]] = {kind.name: kind for kind in (Dpo, Orpo, Simpo, Kto, Grpo)}


def loss_of(text: str | None) -> Loss | None:
    """Return the loss that `text` names, with its settings: `dpo`, or `dpo:KEY=VALUE,KEY=VALUE`. None: of each token alone.

    Raises:
        ConfigError: there is no such loss, or it has no such setting or value; the message names those that it has.
    """
    return None if text is None else read_named("loss", text, LOSSES.values())
