"""What the user chooses about adapters: a kind's name and its settings. `model/adapters/adapters.py` computes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from headrace.terms.errors import ConfigError
from headrace.terms.options.declared import option
from headrace.terms.options.gradient import GradientWay
from headrace.terms.options.named import read_named
from headrace.terms.options.option_kinds import Number, Text, Whole
from headrace.terms.options.row_table import Table

# What peft, too, calls all linear modules of the blocks.
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class Lora(GradientWay):
    """Low-rank adapters (Hu et al. 2022): `W x + alpha/rank B A x` with a frozen W."""

    name: ClassVar[str] = "lora"
    named_by: ClassVar[str] = "adapter"
    gradient_dtype: ClassVar[str | None] = "float32"  # gradients of adapters are small
    offer: ClassVar[str] = "adapters of rank {rank} beside frozen weights (LoRA: not full fine-tuning)"
    merges: ClassVar[bool] = True
    has_magnitudes: ClassVar[bool] = False

    rank: int = option(16, Whole(1, 1 << 16), row="rows of A, and columns of B")
    alpha: float | None = option(
        None, Number(), row="the product of B and A is multiplied by alpha/rank", words="the rank", optional=True
    )
    dropout: float = option(0.0, Number(0, 0.99), row="share of a matrix's inputs that its adapter does not see in a step")
    target_modules: str | None = option(
        None,
        Text(),
        row="modules of blocks, packed experts, an untied head that get adapters, by the ends of names: `q_proj+experts`; or "
        "`all-linear`",
        words="all linear ones of blocks",
    )
    exclude_modules: str | None = option(
        None,
        Text(),
        row="modules that get none although they are targets, by the ends of names: `k_proj+layers.0.mlp.up_proj`",
    )

    from_: str | None = option(
        None,
        Text(),
        row="directory of an adapter in PEFT's files with which training begins; it decides the settings that are not given",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("target_modules", "exclude_modules"):
            if (given := getattr(self, key)) is not None and not _words(given):
                raise ConfigError(f"{key}: {given!r} names no module; join names with + (q_proj+v_proj), or leave it out")

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return (self.rank if self.alpha is None else self.alpha) / self.rank

    @property
    def targets(self) -> tuple[str, ...]:
        """The names given in `target_modules` beside `all-linear`."""
        return tuple(word for word in _words(self.target_modules) if word.lower() != ALL_LINEAR)

    @property
    def all_linear(self) -> bool:
        """Whether all linear modules of the blocks are targets, whatever is named."""
        return self.target_modules is None or len(self.targets) < len(_words(self.target_modules))

    @property
    def excluded(self) -> tuple[str, ...]:
        """The names given in `exclude_modules`."""
        return _words(self.exclude_modules)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split("+") if word.strip())


@dataclass(frozen=True, kw_only=True)
class Dora(Lora):
    """LoRA whose rows have a trained length of their own (Liu et al. 2024): `m (W + s B A) / ||W + s B A||`."""

    name: ClassVar[str] = "dora"
    offer: ClassVar[str] = ""
    has_magnitudes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout:
            raise ConfigError("dropout: dora has none; leave it out, or train lora")


ADAPTERS: Mapping[str, type[Lora | Table]] = {kind.name: kind for kind in (Lora, Dora, Table)}


def adapter_of(text: str) -> Lora | Table:
    """Return the adapter that `text` names, with its settings: `lora`, or `lora:KEY=VALUE,KEY=VALUE`.

    Raises:
        ConfigError: there is no such kind, or it has no such setting or value; the message names those that it has.
    """
    return read_named("adapter", text, ADAPTERS.values())
