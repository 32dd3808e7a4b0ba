"""Which parts of a model may have adapters, and which of these a run's settings choose.

Invariant: names are matched as peft matches them: a word is the whole name of a module, or its end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers.pytorch_utils import Conv1D

from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout
from headrace.terms.options.adapter import Lora

# Names that stock peft takes for packed experts anywhere in a mixture, by transformers' name for the kind of its files. Before
# transformers 5 each expert had linear modules of these names.
_NAMES_OF_EXPERTS = {
    "mixtral": ("gate", "w1", "w2", "w3"),
    "qwen2_moe": ("gate", "gate_proj", "up_proj", "down_proj"),
}
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True, slots=True)
class Product:
    """A module of a block that multiplies with one matrix: `rows` outputs from `columns` inputs.

    Attributes:
        transposed: the matrix lies with a row for each input, as in transformers' Conv1D.
        rank, scale: those of its adapter, once it has one: `scale` is what the product of B and A is multiplied by.
    """

    name: str
    rows: int
    columns: int
    transposed: bool
    rank: int = 0
    scale: float = 1.0

    @property
    def parameter(self) -> str:
        """The name of its matrix."""
        return f"{self.name}.weight"

    def shapes(self, settings: Lora) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its adapter's tensors, by the ends of their names."""
        shapes: dict[str, tuple[int, ...]] = {DOWN: (self.rank, self.columns), UP: (self.rows, self.rank)}
        return shapes | ({MAGNITUDE: (self.rows,)} if settings.has_magnitudes else {})


@dataclass(frozen=True, slots=True)
class Stack(Product):
    """A parameter of packed experts, one matrix for each of `experts`; `name` is its own.

    A single matrix of a module that is not linear, such as a router's, is one, too: of one expert, without a dimension for it.
    """

    experts: int = 1

    @property
    def parameter(self) -> str:
        """The name of its matrices."""
        return self.name

    def shapes(self, settings: Lora) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its adapter's tensors: A has the rows of one expert after another, B mixes their columns."""
        return {DOWN: (self.experts * self.rank, self.columns), UP: (self.rows, self.rank * self.experts)}

    def matrices(self, weights: Tensor) -> Tensor:
        """Return a view of its parameter's `weights` with a dimension for experts."""
        return weights.view(self.experts, *weights.shape[-2:])

    def factors(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return A as (experts, rank, columns) and B as (experts, rows, rank), views as peft takes them."""
        return down.view(self.experts, -1, self.columns), up.view(self.rows, -1, self.experts).permute(2, 0, 1)

    def summed(self, own: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return the sum of matrices `own`, of all experts or of some, and the products of their `factors`."""
        left, right = (down.mT, up.mT) if self.transposed else (up, down)
        if self.experts == 1:  # peft rounds the product of a single matrix, and the factors of several
            return own + (self.scale * (left @ right)).view_as(own).to(own.dtype)
        return torch.baddbmm(own, left.to(own.dtype), right.to(own.dtype), alpha=self.scale)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module does nothing but multiply with a matrix, and add a bias where it has one."""
    return isinstance(module, Conv1D) or (isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward)


def products_of(model: nn.Module, layout: UnitLayout) -> Iterator[Product]:
    """Yield the modules of the unit laid out by `layout` that could have an adapter."""
    known = {spec.name for spec in layout.parameters}
    for name, module in model.named_modules():
        if f"{name}.weight" in known and is_linear(module):
            rows, columns = module.weight.shape
            transposed = isinstance(module, Conv1D)
            yield Product(name, *((columns, rows) if transposed else (rows, columns)), transposed)


def stacks_of(model: nn.Module, layout: UnitLayout) -> Iterator[Stack]:
    """Yield the parameters of packed experts of the unit laid out by `layout`."""
    modules = dict(model.named_modules())
    for spec in layout.parameters:
        # transformers marks classes of packed experts so, by which way their matrices lie.
        transposed = getattr(modules.get(spec.name.rpartition(".")[0]), "is_transposed", None)
        if len(spec.shape) == 3 and isinstance(transposed, bool):
            experts, rows, columns = spec.shape
            yield Stack(spec.name, *((columns, rows) if transposed else (rows, columns)), transposed, experts=experts)


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Return whether a module is one of `targets`, by its whole name or the end of it, as in peft."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def is_stack_target(name: str, targets: Sequence[str]) -> bool:
    """Return whether packed experts are one of `targets`, by their own name or their module's."""
    return is_target(name, targets) or is_target(name.rpartition(".")[0], targets)


def chosen_products(
    model: nn.Module, layouts: Sequence[UnitLayout], num_blocks: int, settings: Lora
) -> tuple[dict[int, tuple[Product, ...]], tuple[str, ...]]:
    """Return what gets adapters under `settings`, by unit, and notes on what is left out.

    Raises:
        ConfigError: a target that is no linear module of a block or a head, or a rank above a side of its matrix.
    """
    # A head has none that is not named, as with peft's `all-linear`.
    units = range(1, len(layouts) if settings.targets else num_blocks + 1)
    known = {unit: tuple(products_of(model, layouts[unit])) for unit in units}
    stacks = {unit: tuple(stacks_of(model, layouts[unit])) for unit in units}
    names, packed = ([each.name for found in kinds.values() for each in found] for kinds in (known, stacks))
    # As in peft a word that names linear modules means these alone, though experts may end with it, too.
    of_stacks = [word for word in settings.targets if not any(is_target(name, (word,)) for name in names)]
    _check_targets(model, names, packed, settings.targets)
    _check_excluded(names, packed, settings.excluded)
    scale, narrow, chosen = settings.scale, list[Product](), dict[int, tuple[Product, ...]]()
    for unit in units:
        everything = settings.all_linear and unit <= num_blocks
        wanted = [each for each in known[unit] if everything or is_target(each.name, settings.targets)]
        wanted += [each for each in stacks[unit] if is_stack_target(each.name, of_stacks)]
        wanted = [each for each in wanted if not _is_one_of(each, settings.excluded)]
        too_narrow = [each for each in wanted if settings.rank > min(each.rows, each.columns)]
        for each in too_narrow:
            if _is_one_of(each, settings.targets):
                _refuse_rank(settings.rank, each)
        narrow += too_narrow
        if found := tuple(replace(each, rank=settings.rank, scale=scale) for each in wanted if each not in too_narrow):
            chosen[unit] = found
    if not chosen and narrow:
        _refuse_rank(settings.rank, max(narrow, key=lambda each: min(each.rows, each.columns)))
    if not chosen:
        raise ConfigError("adapter: exclude_modules leaves no module that could be adapted; name fewer")
    return chosen, _notes_on(narrow, settings.rank)


def _is_one_of(product: Product, words: Sequence[str]) -> bool:
    matches = is_stack_target if isinstance(product, Stack) else is_target
    return matches(product.name, words)


def _refuse_rank(rank: int, each: Product) -> None:
    raise ConfigError(
        f"adapter: rank {rank} is more than {each.name} has: it is {each.rows} x {each.columns}; "
        f"give at most {min(each.rows, each.columns)}, or leave it out: exclude_modules={each.name.rpartition('.')[2]}"
    )


def _notes_on(narrow: Sequence[Product], rank: int) -> tuple[str, ...]:
    """Return a note on modules that are left out because `rank` is above a side of their matrices."""
    ends = sorted({f"{each.name.rpartition('.')[2]} ({each.rows} x {each.columns})" for each in narrow})
    if not ends:
        return ()
    return (f"{len(narrow)} modules are smaller than rank {rank} and get no adapters: {', '.join(ends)}",)


def _check_excluded(names: Sequence[str], packed: Sequence[str], excluded: Sequence[str]) -> None:
    for word in excluded:
        if not any(is_target(name, (word,)) for name in names) and not any(is_stack_target(name, (word,)) for name in packed):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError(f"adapter: exclude_modules: {word!r} is no module that could be adapted; there are {known}")


def _check_targets(model: nn.Module, names: Sequence[str], packed: Sequence[str], targets: Sequence[str]) -> None:
    """Refuse targets that are none of `names` nor of `packed`, which are parameters that stack the matrices of experts."""
    for target in targets:
        if any(is_target(name, (target,)) for name in names) or any(is_stack_target(name, (target,)) for name in packed):
            continue
        if any(is_target(name, (target,)) and is_linear(module) for name, module in model.named_modules()):
            why = "shares its matrix with the embedding; heads that are tied get no adapters, --gradient lsp trains them"
        elif any(is_target(name, (target,)) for name, _ in model.named_modules()):
            why = "is no linear module of a block or a head; --gradient lsp trains it"
        else:
            why = "is none"
        known = sorted({name.rpartition(".")[2] for name in names})
        experts = sorted({".".join(name.split(".")[-2:]) for name in packed})
        also = f"; packed experts are {', '.join(experts)}" if experts else ""
        raise ConfigError(
            f"adapter: target_modules: {target!r} {why}; linear modules are {', '.join(known) or 'not there'}{also}"
        )
    if not names and not targets:
        raise ConfigError(f"adapter: {type(model).__name__} has no linear modules in its blocks that could be adapted")


def is_refused_by_peft(product: Product, model_type: str) -> bool:
    """Return whether stock peft loads no adapter of a module, in a model of `model_type`: of what leaves a Mamba's states."""
    of_states = model_type in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
    return of_states and is_target(product.name, ("out_proj",))


def is_taken_for_experts(product: Product, model_type: str) -> bool:
    """Return whether stock peft takes the name of a linear module for that of packed experts, in a model of `model_type`."""
    kinds = {"mixtral": "mixtral", **getattr(conversion_mapping, "_MODEL_TO_CONVERSION_PATTERN", {})}
    names = _NAMES_OF_EXPERTS.get(kinds.get(model_type, ""), ())
    return not isinstance(product, Stack) and is_target(product.name, names)
