"""LSP-Offload (Chen et al., AAAI 2025): only subspaces of a block's matrices are trained, which sparse projectors define.

A matrix is `c W0 + P S Q^T`. W0 is stored; the run's rule trains S (d, d) on compressed gradients `P^T G Q`. `c` begins at 1,
has no gradient, and decays as S does. So weight decay applies to the whole matrix, and W0 need not be rewritten for it.
Parameters that are no matrices, or are no larger than the subspace, are trained as they are, beside them.

The first step fits projectors to its own gradient. Later each unit has its turn, once in `check` steps. The last micro-batch is
held out and projectors are fitted to the rest of the step's gradient. They are proposed for a matrix if its old ones are too
far off on the held-out micro-batch and the new ones are better there. The rest is done by `flow.step.settle`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from headrace.terms.errors import ConfigError
from headrace.terms.forms import Form
from headrace.terms.layout import ParameterSpec, UnitLayout, lay_out, part, rest_of_master
from headrace.terms.options.declared import option
from headrace.terms.options.gradient import GradientWay
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.option_kinds import Number, OneOf, Whole
from headrace.update.projectors import PROJECTORS, ProjectorKind, relative_error
from headrace.update.rules.table import rule_of
from headrace.update.wires.factors import Factors
from headrace.update.wires.subspace import Subspace, half_and_quarter, subspaces
from headrace.update.wires.wire import Bases, Catching, Moment, Proposal, UnitGradients, Wire

# New projectors must have at most this share of the old ones' error on a held-out micro-batch, because a change is costly.
_WORTH_A_CHANGE = 0.95
# By the names of states' planes: the power of the gradient of which they are sums, which decides how they move to another
# basis.
_POWERS = {"m": 1, "momentum": 1, "v": 2}


@dataclass(frozen=True, kw_only=True)
class Lsp(GradientWay):
    """The settings of LSP-Offload."""

    name: ClassVar[str] = "lsp"
    offer: ClassVar[str] = "subspaces of the blocks' matrices, of half their side (LSP-Offload: not full fine-tuning)"

    dimension: int | None = option(
        None,
        Whole(8, 1 << 20),
        row="side of a subspace; a matrix's side that is no larger is left as it is. 12 bytes for each element of a subspace",
        words="half of the blocks' commonest side where host memory holds the states, else a quarter",
    )
    nonzeros: int = option(8, Whole(1, 64), row="numbers in each row of a projector")
    check: int = option(500, Whole(), row="steps between two looks at how well a block's projectors still fit")
    alpha: float = option(
        0.3, Number(0, 1), row="relative error of a gradient's estimate, on held-out tokens, below which projectors stay"
    )
    rewrite: str = option(
        "refit",
        OneOf(("refit", "step")),
        row="when weights are rewritten: where projectors change, or after each `step`, as in the paper",
    )
    projector: str = option(
        "block",
        OneOf(tuple(PROJECTORS)),
        row="`block`: groups of rows, in closed form; `learned`: the paper's, by descent; `random`: never fitted, a control",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dimension is not None and self.nonzeros > self.dimension:
            raise ConfigError(
                f"nonzeros: {self.nonzeros} in each row of a projector, which has {self.dimension} columns (dimension); "
                f"give at most {self.dimension}, or a larger dimension"
            )

    def begun(self, way: GradientWay) -> GradientWay:
        """Return `way` if it differs from this one only in the dimension, which a plan chose."""
        return way if isinstance(way, Lsp) and self.dimension is None and replace(way, dimension=None) == self else self


class LspWire(Wire):
    """Compresses gradients of blocks to subspaces. `kind` chooses projectors in place of the setting's. `by_factors` may be
    False to compress whole gradients only: it gives other sums, for comparison with plain training.
    """

    ways = (Lsp,)
    settings: Lsp

    def __init__(self, settings: Lsp, seed: int = 0, *, kind: ProjectorKind | None = None, by_factors: bool = True) -> None:
        super().__init__(settings, seed)
        self.merges_each_step = settings.rewrite == "step"
        self._kind = kind or PROJECTORS[settings.projector]
        self._by_factors = by_factors
        self._subspaces: dict[int, tuple[Subspace, ...]] = {}

    @property
    def name(self) -> str:
        """The way and its settings. A run keeps those that it began with."""
        return self.settings.text if self._kind.name == self.settings.projector else f"{self.settings.text} {self._kind.name}"

    def choices(self, layouts: Sequence[UnitLayout]) -> tuple["LspWire", ...]:
        """Return itself; where no dimension is given, wires with half and with a quarter of the blocks' commonest side."""
        if self.settings.dimension is not None:
            return (self,)
        found = (replace(self.settings, dimension=each) for each in half_and_quarter(layouts))
        return tuple(LspWire(each, kind=self._kind, by_factors=self._by_factors) for each in found) or (self,)

    def trained(self, unit: int, layout: UnitLayout, *, is_block: bool) -> UnitLayout | None:
        """Return S and `c` of each matrix, and all other parameters as they are."""
        if not is_block:
            return layout
        found = {each.name: each for each in self._of(unit, layout)}
        if not found:
            return layout
        groups = [(group.learning_rate_scale, group.weight_decay) for group in layout.groups]
        parameters: list[tuple[str, tuple[int, ...], tuple[float, float]]] = []
        for spec in layout.parameters:
            each, key = found.get(spec.name), groups[spec.group]
            parameters.append((spec.name, each.shape if each else spec.shape, key))
            if each:
                parameters.append((each.factor_name, (1,), key))
        return lay_out(layout.name, parameters, kinds=layout.kinds)

    def basis(self, unit: int, layout: UnitLayout, trained: UnitLayout) -> UnitLayout:
        """Return where projectors lie: for each matrix and side its values, then its positions where they are kept."""
        numbers: list[tuple[str, tuple[int, ...], tuple[float, float]]] = [
            (name, (count,), (1.0, 0.0)) for each in self._of(unit, layout) for name, count in each.numbers(self._kind).items()
        ]
        return lay_out(layout.name, numbers)

    def refuse(self, optimizer: Optimizer) -> None:
        """Refuse states that are not known to be moved in 32 bits, and a rule that keeps no master."""
        for plane in rule_of(optimizer, "float32").planes.states:
            if plane.name not in _POWERS or plane.dtype != "float32" or plane.of != "element":
                raise ConfigError(
                    f"gradient: lsp moves a rule's states to other projectors, but cannot move {plane.name!r} "
                    f"({plane.dtype}); use adamw with float32 moments, sgd, lion or lomo"
                )
        if rest_of_master(rule_of(optimizer, "bfloat16").planes.states) is None:
            raise ConfigError(
                "gradient: lsp merges the trained subspace into a master, and this rule keeps none: use lomo, or leave lsp out"
            )

    def refuse_forms(self, forms: Sequence[Form], train: str) -> None:
        """Refuse a model of which nothing would be compressed."""
        if not any(form.basis for form in forms):
            raise ConfigError(
                f"gradient: {self.name}: no matrix of a block has a side longer than a subspace's, so nothing would be "
                "compressed. Give a smaller dimension, or leave lsp out"
            )
        super().refuse_forms(forms, train)

    @contextmanager
    def catch(self, unit: int, layout: UnitLayout, weights: Tensor, gradients: UnitGradients) -> Iterator[Catching]:
        """Compress gradients: by their factors where a product has them; at a check, the whole sum at the end."""
        moment = gradients.moment
        assert moment is not None, "a trained family with a basis is caught at a moment"
        catching = _Catching(self._of(unit, layout), self._kind, gradients, moment)
        if self._is_check(moment) or not catching.is_fitted:
            check = _Check(catching, self.settings)
            yield Catching(check.sink, lambda spec: True)
            check.finish()
            return
        factors = Factors(layout, weights, catching.take_factors, catching.names) if self._by_factors else nullcontext()
        with factors:
            yield Catching(catching.sink, lambda spec: True)

    def as_they_are(self, unit: int, layout: UnitLayout, trained: UnitLayout) -> Iterator[tuple[ParameterSpec, ParameterSpec]]:
        """Yield all parameters but those that have a subspace."""
        subspace = {each.name for each in self._of(unit, layout)}
        yield from (pair for pair in super().as_they_are(unit, layout, trained) if pair[0].name not in subspace)

    def first_weights(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> Tensor:
        """Return S = 0, c = 1, and all other parameters as they are."""
        first = super().first_weights(unit, layout, trained, weights)
        self.restart(unit, layout, trained, first)
        return first

    def complete(self, unit: int, layout: UnitLayout, slot: Tensor, trained: UnitLayout, weights: Tensor) -> None:
        """Make `c W + P S Q^T` of each matrix W, in float32; copy all other parameters in."""
        super().complete(unit, layout, slot, trained, weights)
        own, basis = {spec.name: spec for spec in trained.parameters}, weights[trained.num_elements :]
        places = {spec.name: spec for spec in layout.parameters}
        for each in self._of(unit, layout):
            matrices = part(slot, places[each.name]).view(each.matrices)
            learned = each.pair(self._kind, basis).decompress(part(weights, own[each.name]).view(each.core))
            matrices.copy_(matrices.float().mul_(part(weights, own[each.factor_name])).add_(learned))

    def making_bytes(self, layout: UnitLayout) -> int:
        """Return the most bytes allocated at once: at a check, a unit's summed gradient, and those for judging one matrix."""
        matrices = [spec.num_elements for spec in layout.parameters if len(spec.shape) > 1]
        return 4 * sum(matrices) + 20 * max(matrices, default=0)

    def restart(self, unit: int, layout: UnitLayout, trained: UnitLayout, weights: Tensor) -> None:
        """Set S = 0 and c = 1."""
        own = {spec.name: spec for spec in trained.parameters}
        for each in self._of(unit, layout):
            part(weights, own[each.name]).zero_()
            part(weights, own[each.factor_name]).fill_(1.0)

    def move(self, unit: int, layout: UnitLayout, trained: UnitLayout, bases: Bases, states: Mapping[str, Tensor]) -> None:
        """Move moments of each matrix whose projectors changed: `M <- A M B`, `V <- (A∘A) V (B∘B)`."""
        own = {spec.name: spec for spec in trained.parameters}
        for each in self._of(unit, layout):
            if each.is_alike(self._kind, *bases):
                continue
            old, new = (each.pair(self._kind, basis) for basis in bases)
            for name, plane in states.items():
                moment = part(plane, own[each.name])
                moment.copy_(old.move(new, moment.view(each.core), square=_POWERS[name] == 2).reshape(-1))

    def _of(self, unit: int, layout: UnitLayout) -> tuple[Subspace, ...]:
        if unit not in self._subspaces:
            self._subspaces[unit] = subspaces(layout, self.settings.dimension, self.settings.nonzeros, self._kind)
        return self._subspaces[unit]

    def _is_check(self, moment: Moment) -> bool:
        every = self.settings.check
        return moment.step > 0 and self._kind.name != "random" and moment.step % every == (moment.unit - 1) % every


class _Catching:
    """Gradients of one unit in one micro-batch. `is_fitted`: it has projectors; `names`: matrices that may come by factors."""

    def __init__(self, found: Sequence[Subspace], kind: ProjectorKind, gradients: UnitGradients, moment: Moment) -> None:
        self.subspaces, self.kind, self.gradients = {each.name: each for each in found}, kind, gradients
        self.moment, self.basis = moment, moment.basis
        self.names = frozenset(each.name for each in found if each.stack == 1)
        self.is_fitted = bool(moment.basis.any())

    def sink(self, spec: ParameterSpec, gradient: Tensor) -> None:
        """Take a whole gradient."""
        found = self.subspaces.get(spec.name)
        if found is None:
            self.gradients.add(spec.name, gradient)
        else:
            pair = found.pair(self.kind, self.basis)
            self.gradients.add(spec.name, pair.compress(gradient.detach().view(found.matrices).float()))

    def take_factors(self, name: str, outputs: Tensor, inputs: Tensor) -> None:
        """Take the gradient `outputs^T inputs` of a product's matrix, both of (tokens, features)."""
        pair, total = self.subspaces[name].pair(self.kind, self.basis), None
        for start in range(0, outputs.shape[0], _FACTOR_TOKENS):
            rows = slice(start, start + _FACTOR_TOKENS)
            found = pair.compress_factors(_columns(outputs[rows]), _columns(inputs[rows]))
            total = found if total is None else total.add_(found)
        if total is not None:
            self.gradients.add(name, total)


# Tokens whose factors are compressed at once: their float32 copies take memory.
_FACTOR_TOKENS = 512


def _columns(tokens: Tensor) -> Tensor:
    return tokens.float().T.contiguous()[None]


class _Check:
    """A step in which a unit's gradient is summed whole, to see how far off its projectors are, and to try others.

    The sum of all micro-batches but the last is the sample; projectors are judged on the last one. With a single micro-batch
    there is nothing to judge by, and existing projectors stay.
    """

    def __init__(self, catching: _Catching, settings: Lsp) -> None:
        self._catching, self._settings = catching, settings
        self._other = catching.basis.clone()
        self._errors: dict[str, tuple[float, float | None]] = {}
        self._changed = False
        self._done: set[str] = set()

    @property
    def _is_last(self) -> bool:
        return self._catching.moment.micro == self._catching.moment.num_micro - 1

    def sink(self, spec: ParameterSpec, gradient: Tensor) -> None:
        """Take a whole gradient."""
        found, kept = self._catching.subspaces.get(spec.name), self._catching.moment.kept
        if found is None:
            self._catching.gradients.add(spec.name, gradient)
            return
        whole = gradient.detach().view(found.matrices)
        if not self._is_last:
            if spec.name in kept:
                kept[spec.name].add_(whole)
            else:
                kept[spec.name] = whole.to(torch.float32, copy=True)
        elif spec.name in self._done:  # more of the last micro-batch, because its rows are run by samples
            self._deliver(found, whole.float())
        else:
            self._conclude(found, whole.float())

    def finish(self) -> None:
        """After the last micro-batch, propose the projectors that were found."""
        if not self._is_last:
            return
        for name, found in self._catching.subspaces.items():
            if name not in self._done:  # no gradient reached it in the last micro-batch
                self._conclude(found, None)
        self._catching.moment.kept.clear()
        replaces = self._catching.is_fitted
        if self._changed or self._errors:
            basis = self._other.cpu() if self._changed else torch.empty(0, dtype=torch.float32)
            self._catching.moment.propose(Proposal(basis, replaces, self._errors))

    def _conclude(self, found: Subspace, last: Tensor | None) -> None:
        """Choose projectors for a matrix, and compress its sum by those that are valid in this step."""
        catching, kept = self._catching, self._catching.moment.kept.pop(found.name, None)
        self._done.add(found.name)
        if not catching.is_fitted:
            whole = _sum(kept, last)
            sample = torch.zeros(found.matrices, device=catching.basis.device, dtype=torch.float32) if whole is None else whole
            self._fit(found, sample)
            self._errors[found.name] = float(relative_error(found.pair(catching.kind, self._other), sample)), None
        else:
            if last is not None:
                self._judge(found, kept, last)
            whole = _sum(kept, last)
        if whole is not None:
            self._deliver(found, whole)

    def _judge(self, found: Subspace, sample: Tensor | None, held_out: Tensor) -> None:
        catching = self._catching
        error = float(relative_error(found.pair(catching.kind, catching.basis), held_out))
        self._errors[found.name] = error, None
        # A sample that is not finite is not judged: the step will be skipped.
        if sample is None or not error > self._settings.alpha or not bool(sample.isfinite().all()):
            return
        self._fit(found, sample)
        after = float(relative_error(found.pair(catching.kind, self._other), held_out))
        self._errors[found.name] = error, after
        if not after < _WORTH_A_CHANGE * error:
            found.copy(catching.kind, catching.basis, self._other)
        self._changed = self._changed or after < _WORTH_A_CHANGE * error

    def _fit(self, found: Subspace, sample: Tensor) -> None:
        moment = self._catching.moment
        if not bool(sample.isfinite().all()):
            return
        words = f"{moment.seed}/{moment.step}/{moment.unit}/{found.name}"
        seed = int.from_bytes(hashlib.blake2b(words.encode(), digest_size=7).digest(), "little")
        found.fit(self._catching.kind, sample, self._other, torch.Generator().manual_seed(seed))
        self._changed = self._changed or not self._catching.is_fitted

    def _deliver(self, found: Subspace, whole: Tensor) -> None:
        """Compress by the projectors that are valid in this step: first ones at once, later ones from the next step on."""
        catching = self._catching
        pair = found.pair(catching.kind, catching.basis if catching.is_fitted else self._other)
        # A gradient that is not finite has to stay so in any basis, and where there is none.
        core = (
            pair.compress(whole)
            if bool(whole.isfinite().all())
            else torch.full(found.core, torch.nan, device=whole.device, dtype=torch.float32)
        )
        catching.gradients.add(found.name, core)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other)
