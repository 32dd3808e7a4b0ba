"""The forms of a model's units. They follow from a run's wire, its codec, where far units live, and its rule."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.codec import Codec, coded_unit, decoding_bytes
from headrace.terms.cuts import cuts_of
from headrace.terms.errors import ConfigError
from headrace.terms.forms import Form, home_of
from headrace.terms.layout import UnitLayout, lay_out, realigned
from headrace.terms.options.optimizer import ALL, Optimizer
from headrace.terms.plain_figures import plain_figure
from headrace.terms.rule_figures import RuleFigures
from headrace.update.wires.stored_codes import StoredCodes
from headrace.update.wires.wire import Wire


@dataclass(frozen=True, slots=True)
class Coding:
    """How weights are coded: `codec` codes the blocks that are not trained in place, except those that the model's files hold
    coded already (`stored`). `on_host`: the host computes, and decodes.
    """

    codec: Codec | None = None
    stored: StoredCodes = field(default_factory=StoredCodes)
    on_host: bool = True


def forms_under(
    layouts: Sequence[UnitLayout],
    num_blocks: int,
    wire: Wire,
    rule: RuleFigures,
    optimizer: Optimizer | None,
    coding: Coding,
    is_far: Callable[[int], bool] = lambda unit: False,
) -> tuple[Form, ...]:
    """Return the forms of units laid out by `layouts` under a wire and a rule; the rule says how parameters are aligned and
    cut.

    `optimizer` says which parameters stay as they are (None: only those that are frozen anyway): a unit that has only such
    parameters is frozen.

    Raises:
        ConfigError: nothing is trained, or a coded unit would be trained in place.
    """
    codec, stored, codecs, forms = coding.codec, coding.stored.units, coding.stored.codecs, []
    for unit, layout in enumerate(layouts):
        is_block = 1 <= unit <= num_blocks
        left = _left(layout, optimizer, is_block=is_block)
        trained = _without(wire.trained(unit, layout, is_block=is_block), layout, left)
        coded = codec if is_block and trained is not layout else None
        own, basis = trained is not None and trained is not layout, None
        if own and trained is not None:
            trained = realigned(trained, rule.parameter_alignment)
            basis = wire.basis(unit, layout, trained)
        if unit in stored and trained is layout:
            raise ConfigError(
                f"{layout.name}: its weights are coded ({', '.join(sorted(codecs))}), and cannot be trained in place; "
                "give --adapter lora, or train the model that `headrace decompress` makes of it"
            )
        code = stored.get(unit) or (coded_unit(layout, coded, rule.planes) if coded else None)
        known = {**codecs, **({coded.name: coded} if coded else {})}
        decoding = decoding_bytes(code, known, on_host=coding.on_host) if code else 0
        forms.append(
            Form(
                layout=layout,
                trained=trained,
                home=home_of(unit, num_blocks),
                code=code,
                making_bytes=decoding + (wire.making_bytes(layout) if own else 0),
                cuts=cuts_of(trained, rule) if trained else (),
                is_far=is_far(unit),
                basis=basis,
                left=left,
                is_beside=own and wire.is_beside,
                table=wire.table(unit),
            )
        )
    wire.refuse_forms(forms, optimizer.train if optimizer else ALL)
    return tuple(forms)


def _left(layout: UnitLayout, optimizer: Optimizer | None, *, is_block: bool) -> frozenset[str]:
    """Return the names of a unit's parameters that stay as they are."""
    trains = (optimizer or Optimizer()).trains
    left = (spec for spec in layout.parameters if not trains(spec.name, len(spec.shape), spec.kind, is_block=is_block))
    return frozenset(spec.name for spec in left)


def _without(trained: UnitLayout | None, layout: UnitLayout, left: frozenset[str]) -> UnitLayout | None:
    """Return the layout of what is trained of a unit, without `left` parameters: in place these keep their room in it."""
    if trained is None or not left:
        return trained
    if trained is layout:
        return None if len(left) == len(layout.parameters) else layout
    keys = [(group.learning_rate_scale, group.weight_decay) for group in trained.groups]
    kept = [(spec.name, spec.shape, keys[spec.group]) for spec in trained.parameters if spec.name not in left]
    return lay_out(trained.name, kept, kinds=trained.kinds) if kept else None


def notes_on(forms: Sequence[Form]) -> tuple[str, ...]:
    """Return what a person should know about what is trained: subspaces, and parameters that stay; () where all is trained."""
    whole = sum(form.layout.num_parameters for form in forms)
    left = sum(spec.num_elements for form in forms for spec in form.layout.parameters if spec.name in form.left)
    notes = (f"train: {plain_figure(100 * left / whole)} % of the parameters stay as they are",) if left else ()
    return (*_subspace_notes(forms, whole, left), *notes)


def _subspace_notes(forms: Sequence[Form], whole: int, left: int) -> tuple[str, ...]:
    core = replaced = side = 0
    for form in forms:
        if form.basis is None or form.trained is None:
            continue
        own = {spec.name: spec.num_elements for spec in form.trained.parameters}
        shapes = {spec.name: spec.shape for spec in form.trained.parameters}
        smaller = [spec for spec in form.layout.parameters if own.get(spec.name, spec.num_elements) < spec.num_elements]
        core += sum(own[spec.name] for spec in smaller)
        side = max((side, *(each for spec in smaller for each in _shrunk(spec.shape, shapes[spec.name]))))
        replaced += sum(spec.num_elements for spec in smaller)
    if not replaced:
        return ()
    return (
        f"gradient: subspaces of side {side} have {plain_figure(core / 1000000.0)} million numbers for "
        f"{plain_figure(replaced / 1000000.0)} million of matrices. {plain_figure(100 * (whole - replaced - left) / whole)} "
        "% of the parameters are trained whole",
    )


def _shrunk(shape: Sequence[int], own: Sequence[int]) -> Iterator[int]:
    """Yield those sides of a subspace that are shorter than its matrix's."""
    return (there for here, there in zip(shape, own, strict=True) if there < here)
