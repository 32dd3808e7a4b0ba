"""Adapters beside the frozen matrices of blocks, and of a head that is named: LoRA (Hu et al. 2022) and DoRA (Liu et al. 2024).

Each adapted module keeps its own code; a hook adds to what it returns. Packed experts, which are no modules, compute with the
sum of their matrices and what the adapter learned, as peft's `target_parameters` do. Matrices of adapters are float32 and
compute in float32, which is peft's default for a base in 16 bits. They are bound unit by unit, as weights are (`binding`).

Invariant: what a block computes with adapters bound is what peft's layers compute around the same modules.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headrace.model.binding import GradientSink, hand_over
from headrace.terms.adapter import Lora
from headrace.terms.errors import ConfigError, StepFailed
from headrace.terms.layout import UnitLayout, lay_out, part

# Elements of a matrix that are computed in float32 at once.
_PIECE_ELEMENTS = 1 << 20
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True, slots=True)
class Product:
    """A module of a block that multiplies with one matrix: `rows` outputs from `columns` inputs.

    `transposed`: the matrix lies with a row for each input, as in transformers' Conv1D.
    """

    name: str
    rows: int
    columns: int
    transposed: bool

    @property
    def parameter(self) -> str:
        """The name of its matrix."""
        return f"{self.name}.weight"

    def shapes(self, settings: Lora) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its adapter's tensors, by the ends of their names."""
        shapes: dict[str, tuple[int, ...]] = {DOWN: (settings.rank, self.columns), UP: (self.rows, settings.rank)}
        return shapes | ({MAGNITUDE: (self.rows,)} if settings.has_magnitudes else {})


@dataclass(frozen=True, slots=True)
class Stack(Product):
    """A parameter of packed experts, one matrix for each of `experts`; `name` is its own."""

    experts: int

    @property
    def parameter(self) -> str:
        """The name of its matrices."""
        return self.name

    def shapes(self, settings: Lora) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its adapter's tensors: A has the rows of one expert after another, B mixes their columns."""
        return {DOWN: (self.experts * settings.rank, self.columns), UP: (self.rows, settings.rank * self.experts)}

    def factors(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Return A as (experts, rank, columns) and B as (experts, rows, rank), views as peft takes them."""
        return down.view(self.experts, -1, self.columns), up.view(self.rows, -1, self.experts).permute(2, 0, 1)


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
            yield Stack(spec.name, *((columns, rows) if transposed else (rows, columns)), transposed, experts)


def is_target(name: str, targets: Sequence[str]) -> bool:
    """Return whether a module is one of `targets`, by its whole name or the end of it, as in peft; () stands for all."""
    return not targets or any(name == target or name.endswith(f".{target}") for target in targets)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model's blocks, and of its head where that is one of the settings' targets.

    Attributes:
        settings: their kind and its settings.
        seed: what their first numbers are drawn from.
        products: the modules that are adapted, by unit.
        layouts: where the tensors of a unit's adapters lie, by unit; they are called `MODULE.lora_A.weight` and so on.
    """

    settings: Lora
    seed: int
    products: Mapping[int, tuple[Product, ...]]
    layouts: Mapping[int, UnitLayout]
    _bound: dict[str, nn.Parameter] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, layouts: Sequence[UnitLayout], num_blocks: int, settings: Lora, seed: int = 0) -> "Adapters":
        """Return the adapters that `settings` ask for, of a model whose units are laid out so.

        Raises:
            ConfigError: a target that is no linear module of a block or a head, or a rank above a side of its matrix.
        """
        # Without targets a head has none, as with peft's `all-linear`.
        units = range(1, len(layouts) if settings.targets else num_blocks + 1)
        known = {unit: tuple(products_of(model, layouts[unit])) for unit in units}
        stacks = {unit: tuple(stacks_of(model, layouts[unit])) for unit in units}
        names, packed = ([each.name for found in kinds.values() for each in found] for kinds in (known, stacks))
        # As in peft a word that names linear modules means these alone, though experts may end with it, too.
        of_stacks = [word for word in settings.targets if not any(is_target(name, (word,)) for name in names)]
        _check_targets(model, names, packed, settings.targets)
        if asked := [name for name in packed if of_stacks and _is_stack_of(name, of_stacks)]:
            _refuse_of_stacks(asked[0], settings)
        products = {
            unit: chosen
            for unit, found in known.items()
            if (
                chosen := (
                    *(each for each in found if is_target(each.name, settings.targets)),
                    *(each for each in stacks[unit] if of_stacks and _is_stack_of(each.name, of_stacks)),
                )
            )
        }
        for each in (each for found in products.values() for each in found):
            if settings.rank > min(each.rows, each.columns):
                raise ConfigError(
                    f"adapter: rank {settings.rank} is more than {each.name} has: it is {each.rows} x {each.columns}; "
                    f"give at most {min(each.rows, each.columns)}, or leave it out of target_modules"
                )
        return cls(
            settings, seed, products, {unit: _lay_out(layouts[unit], found, settings) for unit, found in products.items()}
        )

    def install(self, model: nn.Module) -> Callable[[], None]:
        """Let the modules of `model` add what their adapters compute; return the function that undoes it."""
        modules, hooks = dict(model.named_modules()), []
        for each in (each for found in self.products.values() for each in found):
            if isinstance(each, Stack):
                before, after = self._hooks_of_stack(each)
                owner = modules[each.name.rpartition(".")[0]]
                hooks += [owner.register_forward_pre_hook(before), owner.register_forward_hook(after, always_call=True)]
            else:
                hooks.append(modules[each.name].register_forward_hook(self._hook(each)))

        def undo() -> None:
            for hook in hooks:
                hook.remove()

        return undo

    def bind(self, unit: int, layout: UnitLayout, flat: Tensor, sink: GradientSink | None) -> None:
        """Make the adapters of `unit` views of `flat` (float32), laid out by `layout`; `sink` gets their gradients."""
        for spec in layout.parameters if unit in self.products else ():
            parameter = nn.Parameter(part(flat.detach(), spec).view(spec.shape), requires_grad=sink is not None)
            if sink is not None:
                parameter.register_post_accumulate_grad_hook(hand_over(spec, sink))  # type: ignore[no-untyped-call]
            self._bound[spec.name] = parameter

    def release(self, unit: int) -> None:
        """Forget what the adapters of `unit` are views of."""
        for spec in self.layouts[unit].parameters if unit in self.layouts else ():
            self._bound.pop(spec.name, None)

    def first(self, unit: int, layout: UnitLayout, weights: Mapping[str, Tensor], into: Tensor) -> None:
        """Fill `into`, laid out by `layout`, with a unit's first numbers: A as `nn.Linear` begins, B zero, and magnitudes from
        the unit's matrices, which `weights` give by parameter.

        A is drawn from the seed and the module's name, and depends on nothing else.
        """
        into.zero_()
        places = {spec.name: part(into, spec).view(spec.shape) for spec in layout.parameters}
        for each in self.products[unit]:
            seed = hashlib.blake2b(f"{self.seed}/{each.name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
            bound = 1 / math.sqrt(each.columns)
            places[f"{each.name}.{DOWN}"].uniform_(-bound, bound, generator=generator)
            if self.settings.has_magnitudes:
                matrix = _as_product(each, weights[each.parameter])
                places[f"{each.name}.{MAGNITUDE}"].copy_(torch.linalg.vector_norm(matrix.float(), dim=1))

    @torch.no_grad()
    def merge(self, unit: int, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Change `weights`, a unit's matrices by parameter, in place, so that they compute alone what they computed with the
        adapters, whose `tensors` are given by name. The result is made in float32, and rounded once.
        """
        for each in self.products[unit]:
            down, up = (tensors[f"{each.name}.{end}"] for end in (DOWN, UP))
            magnitude = tensors.get(f"{each.name}.{MAGNITUDE}")
            matrices = weights[each.parameter]
            every = zip(matrices, *each.factors(down, up), strict=True) if isinstance(each, Stack) else [(matrices, down, up)]
            for own, down_of_it, up_of_it in every:
                matrix = _as_product(each, own)
                for rows in _pieces(each):
                    whole = matrix[rows].float() + self.settings.scale * (up_of_it[rows] @ down_of_it)
                    if magnitude is not None:
                        whole *= (magnitude[rows] / torch.linalg.vector_norm(whole, dim=1))[:, None]
                    matrix[rows] = whole.to(matrix.dtype)

    def _hooks_of_stack(self, stack: Stack) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return what puts the sum of experts' matrices and their adapters in the place of a parameter, and takes it out."""
        name, kept = stack.name.rpartition(".")[2], []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            down, up = (self._bound.get(f"{stack.name}.{end}") for end in (DOWN, UP))
            if down is None or up is None:
                raise StepFailed(f"{stack.name}: runs while its adapter is not bound; bind it with its unit")
            own = module._parameters[name]
            assert own is not None, "experts have their matrices"
            left, right = reversed(stack.factors(down, up))
            if stack.transposed:
                left, right = right.mT, left.mT
            kept.append(own)
            both = torch.baddbmm(own.detach(), left.to(own.dtype), right.to(own.dtype), alpha=self.settings.scale)
            module._parameters[name] = both  # type: ignore[assignment]

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if kept:
                module._parameters[name] = kept.pop()

        return before, after

    def _hook(self, product: Product) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        settings, names = self.settings, {end: f"{product.name}.{end}" for end in product.shapes(self.settings)}

        def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            found = {end: self._bound.get(name) for end, name in names.items()}
            down, up, magnitude = found[DOWN], found[UP], found.get(MAGNITUDE)
            if down is None or up is None:
                raise StepFailed(f"{product.name}: runs while its adapter is not bound; bind it with its unit")
            inputs = args[0].to(down.dtype)
            if settings.dropout and module.training:
                inputs = F.dropout(inputs, settings.dropout)
            learned = F.linear(F.linear(inputs, down), up) * settings.scale
            if magnitude is not None:
                norms = self._norms(product, module, down, up)
                scale = magnitude / norms
                bias = module.bias
                own = output if bias is None else output - bias  # type: ignore[operator]
                learned = (scale - 1) * own + scale * learned
            return (output + learned).to(output.dtype)

        return add

    @torch.no_grad()
    def _norms(self, product: Product, module: nn.Module, down: Tensor, up: Tensor) -> Tensor:
        """Return the lengths of the rows of `W + s B A`, of which no gradient is taken (section 4.3 of the paper)."""
        matrix = _as_product(product, module.weight)  # type: ignore[arg-type]
        pieces = (matrix[rows].to(down.dtype) + self.settings.scale * (up[rows] @ down) for rows in _pieces(product))
        return torch.cat([torch.linalg.vector_norm(piece, dim=1) for piece in pieces])


def refuse_stacks(adapters: Adapters) -> None:
    """Refuse adapters of packed experts where experts are read one at a time.

    Raises:
        ConfigError: there are such.
    """
    for each in (each for found in adapters.products.values() for each in found):
        if isinstance(each, Stack):
            raise ConfigError(
                f"adapter: {each.name}: packed experts have adapters; merge them first: `headrace export RUN OUT --merge`"
            )


def _refuse_of_stacks(name: str, settings: Lora) -> None:
    """Refuse what cannot be computed of a sum of matrices: peft refuses it, too."""
    if settings.has_magnitudes:
        raise ConfigError(f"adapter: dora: {name} are packed experts, which get adapters of lora; give lora")
    if settings.dropout:
        raise ConfigError(f"adapter: dropout: {name} are packed experts, whose adapters have no dropout; leave it out")


def _is_stack_of(name: str, targets: Sequence[str]) -> bool:
    """Return whether packed experts are one of `targets`, by their own name or their module's."""
    return is_target(name, targets) or is_target(name.rpartition(".")[0], targets)


def merging_bytes(products: Sequence[Product]) -> int:
    """Return the bytes that `merge` allocates at once: two pieces of rows in float32."""
    return max((8 * max(_PIECE_ELEMENTS, each.columns) for each in products), default=0)


def _pieces(product: Product) -> Iterator[slice]:
    step = max(1, _PIECE_ELEMENTS // product.columns)
    return (slice(start, min(start + step, product.rows)) for start in range(0, product.rows, step))


def _as_product(product: Product, weight: Tensor) -> Tensor:
    """Return a view of a matrix that has a row for each output."""
    return weight.T if product.transposed else weight


def _lay_out(layout: UnitLayout, products: Sequence[Product], settings: Lora) -> UnitLayout:
    """Place a unit's adapters; each is decayed and learns as the matrix beside it would."""
    groups = [(group.learning_rate_scale, group.weight_decay) for group in layout.groups]
    of_matrix = {spec.name: groups[spec.group] for spec in layout.parameters}
    parameters = [
        (f"{each.name}.{end}", shape, (of_matrix[each.parameter][0], 0.0) if end == MAGNITUDE else of_matrix[each.parameter])
        for each in products
        for end, shape in each.shapes(settings).items()
    ]
    return lay_out(layout.name, parameters)


def _check_targets(model: nn.Module, names: Sequence[str], packed: Sequence[str], targets: Sequence[str]) -> None:
    """Refuse targets that are none of `names` nor of `packed`, which are parameters that stack the matrices of experts."""
    for target in targets:
        if any(is_target(name, (target,)) for name in names) or any(_is_stack_of(name, (target,)) for name in packed):
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
