"""Adapters beside the frozen matrices of blocks, and of a head that is named: LoRA (Hu et al. 2022) and DoRA (Liu et al. 2024).

Each adapted module keeps its own code; a hook adds to what it returns. Packed experts, which are no modules, compute with the
sum of their matrices and what the adapter learned, as peft's `target_parameters` do. Matrices of adapters are float32 and
compute in float32, which is peft's default for a base in 16 bits.

Invariant: what a block computes with adapters bound is what peft's layers compute around the same modules.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.model.adapters.adapter_targets import (
    DOWN,
    MAGNITUDE,
    UP,
    Product,
    Stack,
    chosen_products,
    is_refused_by_peft,
    is_taken_for_experts,
)
from headrace.model.blocks.beside import BesideKind
from headrace.terms.errors import ConfigError
from headrace.terms.layout import UnitLayout, lay_out, part
from headrace.terms.options.adapter import Lora

# Elements of a matrix that are computed in float32 at once.
_PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Adapters(BesideKind):
    """The adapters of a model's blocks, and of its head where that is one of the settings' targets.

    Their tensors are called `MODULE.lora_A.weight` and so on.

    Attributes:
        settings: their kind and its settings.
        products: the modules that are adapted, by unit.
    """

    settings: Lora
    products: Mapping[int, tuple[Product, ...]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layouts: Sequence[UnitLayout],
        num_blocks: int,
        settings: Lora,
        seed: int = 0,
        stored_type: str = "",
    ) -> "Adapters":
        """Return the adapters that `settings` ask for, of a model whose units are laid out so; its files have `stored_type`.

        Raises:
            ConfigError: a target that is no linear module of a block or a head, or a rank above a side of its matrix.
        """
        chosen, notes = chosen_products(model, layouts, num_blocks, settings)
        return cls.over(layouts, settings, chosen, seed, (*notes, *_notes_on_files(chosen, settings, stored_type)))

    @classmethod
    def over(
        cls,
        layouts: Sequence[UnitLayout],
        settings: Lora,
        products: Mapping[int, Sequence[Product]],
        seed: int = 0,
        notes: tuple[str, ...] = (),
    ) -> "Adapters":
        """Return the adapters of `products`, which have their ranks, by unit.

        Raises:
            ConfigError: packed experts are to have what is computed of single matrices alone.
        """
        for each in (each for found in products.values() for each in found if isinstance(each, Stack)):
            _refuse_of_stack(each.name, settings)
        placed = {unit: _lay_out(layouts[unit], found, settings) for unit, found in products.items()}
        every = {unit: tuple(found) for unit, found in products.items()}
        return cls(settings=settings, seed=seed, products=every, layouts=placed, notes=notes)

    @property
    def ranks_and_scales(self) -> dict[str, str]:
        """What each module is adapted by, in words."""
        every = (each for found in self.products.values() for each in found)
        return {each.name: f"of rank {each.rank}, times {each.scale:g}" for each in every}

    @property
    def dropout(self) -> float:
        """The share of a matrix's inputs that its adapter does not see in a step."""
        return self.settings.dropout

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

    def beside_experts(self, module: str) -> "BesideExperts | None":
        """Return what is bound beside the packed experts of `module`, by its whole name; None where nothing is adapted."""
        found = [each for unit in self.products.values() for each in unit if isinstance(each, Stack)]
        stacks = tuple(each for each in found if each.name.rpartition(".")[0] == module)
        tensors = tuple(tensor for stack in stacks for tensor in self.bound(stack.name, DOWN, UP))
        return BesideExperts(stacks, tensors) if stacks else None

    def first(self, unit: int, layout: UnitLayout, weights: Mapping[str, Tensor], into: Tensor) -> None:
        """Fill `into`, laid out by `layout`, with a unit's initial numbers: A like `nn.Linear`, B zero, and magnitudes from the
        unit's matrices. `weights` give these by parameter.

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
        """Merge the adapters into `weights`, a unit's matrices by parameter, in place. Alone they then compute what they
        computed with the adapters, whose `tensors` are given by name. The result is made in float32, and rounded once.
        """
        for each in self.products[unit]:
            down, up = (tensors[f"{each.name}.{end}"] for end in (DOWN, UP))
            magnitude = tensors.get(f"{each.name}.{MAGNITUDE}")
            matrices = weights[each.parameter]
            every = [(matrices, down, up)]
            if isinstance(each, Stack):
                every = list(zip(each.matrices(matrices), *each.factors(down, up), strict=True))
            for own, down_of_it, up_of_it in every:
                matrix = _as_product(each, own)
                for rows in _pieces(each):
                    whole = matrix[rows].float() + each.scale * (up_of_it[rows] @ down_of_it)
                    if magnitude is not None:
                        whole *= (magnitude[rows] / torch.linalg.vector_norm(whole, dim=1))[:, None]
                    matrix[rows] = whole.to(matrix.dtype)

    def merging_bytes(self, unit: int) -> int:
        """Return the bytes that `merge` allocates at once: two pieces of rows in float32."""
        return max((8 * max(_PIECE_ELEMENTS, each.columns) for each in self.products[unit]), default=0)

    def _hooks_of_stack(self, stack: Stack) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return what puts the sum of experts' matrices and their adapters in the place of a parameter, and takes it out."""
        name, kept = stack.name.rpartition(".")[2], []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if "forward" in vars(module):  # its experts come one at a time, and each is summed then
                return
            down, up = self.bound(stack.name, DOWN, UP)
            own = module._parameters[name]
            assert own is not None, "experts have their matrices"
            kept.append(own)
            module._parameters[name] = stack.summed(own.detach(), *stack.factors(down, up))  # type: ignore[assignment]

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if kept:
                module._parameters[name] = kept.pop()

        return before, after

    def _hook(self, product: Product) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        settings = self.settings

        def add(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            down, up, *magnitudes = self.bound(product.name, *product.shapes(settings))
            inputs = args[0].to(down.dtype)
            if settings.dropout and module.training:
                inputs = F.dropout(inputs, settings.dropout)
            learned = F.linear(F.linear(inputs, down), up) * product.scale
            for magnitude in magnitudes:
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
        pieces = (matrix[rows].to(down.dtype) + product.scale * (up[rows] @ down) for rows in _pieces(product))
        return torch.cat([torch.linalg.vector_norm(piece, dim=1) for piece in pieces])


@dataclass(frozen=True, slots=True)
class BesideExperts:
    """The adapters of a module of packed experts, which come one at a time: a `parted_experts.BesideThem`."""

    stacks: tuple[Stack, ...]
    tensors: tuple[Tensor, ...]  # A and B of each

    def of_expert(self, expert: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `BesideThem`."""
        pairs = zip(self.stacks, tensors[::2], tensors[1::2], strict=True)
        return [each[expert : expert + 1] for stack, down, up in pairs for each in stack.factors(down, up)]

    def joined(self, weights: Mapping[str, Tensor], parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """See `BesideThem`."""
        pairs = zip(self.stacks, parts[::2], parts[1::2], strict=True)
        named = ((stack.name.rpartition(".")[2], stack, down, up) for stack, down, up in pairs)
        return {**weights, **{name: stack.summed(weights[name].detach(), down, up) for name, stack, down, up in named}}


def _notes_on_files(products: Mapping[int, Sequence[Product]], settings: Lora, stored_type: str) -> tuple[str, ...]:
    """Return a note on adapters that stock peft does not load."""
    every = [each for found in products.values() for each in found]
    dora = settings.has_magnitudes
    unread = [
        each for each in every if is_refused_by_peft(each, stored_type) or (dora and is_taken_for_experts(each, stored_type))
    ]
    ends = sorted({each.name.rpartition(".")[2] for each in unread})
    if not ends:
        return ()
    lora = "" if any(is_refused_by_peft(each, stored_type) for each in unread) else "train lora, or "
    return (
        f"peft does not load {settings.name} of {', '.join(ends)} in {stored_type}: {lora}give "
        f"exclude_modules={'+'.join(ends)}, or merge the finished run (`headrace export RUN OUT --merge`). Headrace itself "
        "reads these adapters",
    )


def _refuse_of_stack(name: str, settings: Lora) -> None:
    """Refuse what cannot be computed of a sum of matrices: peft refuses it, too."""
    if settings.has_magnitudes:
        raise ConfigError(f"adapter: dora: {name} are packed experts, which get adapters of lora; give lora")
    if settings.dropout:
        raise ConfigError(f"adapter: dropout: {name} are packed experts, whose adapters have no dropout; leave it out")


def _pieces(product: Product) -> Iterator[slice]:
    step = max(1, _PIECE_ELEMENTS // product.columns)
    return (slice(start, min(start + step, product.rows)) for start in range(0, product.rows, step))


def _as_product(product: Product, weight: Tensor) -> Tensor:
    """Return a view of a matrix that has a row for each output."""
    return weight.T if product.transposed else weight


def _lay_out(layout: UnitLayout, products: Sequence[Product], settings: Lora) -> UnitLayout:
    """Place a unit's adapters; each is decayed and learns as the matrix beside it would. In the model's own files matrices have
    no groups, and adapters are only read.
    """
    groups = dict(enumerate((group.learning_rate_scale, group.weight_decay) for group in layout.groups))
    of_matrix = {spec.name: groups.get(spec.group, (1.0, 0.0)) for spec in layout.parameters}
    parameters = [
        (f"{each.name}.{end}", shape, of_matrix[each.parameter])
        for each in products
        for end, shape in each.shapes(settings).items()
    ]
    kinds = {f"{each.name}.{end}": layout.kinds.get(each.parameter, "") for each in products for end in each.shapes(settings)}
    return lay_out(layout.name, parameters, kinds=kinds)
