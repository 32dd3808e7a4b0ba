"""The forms of a model's units under what a run is made of: its wire, its codec, where far units live, and its rule."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from headrace.codec import Codec, coded_unit, decoding_bytes
from headrace.terms.coding import CodedUnit
from headrace.terms.cuts import cuts_of
from headrace.terms.errors import ConfigError
from headrace.terms.forms import Form, home_of
from headrace.terms.layout import UnitLayout, realigned
from headrace.terms.plain_figures import plain_figure
from headrace.terms.rule_figures import RuleFigures
from headrace.update.wire import SubspaceWire, Wire
from headrace.update.wires.frozen import FrozenWire


def forms_under(
    layouts: Sequence[UnitLayout],
    num_blocks: int,
    wire: Wire,
    rule: RuleFigures,
    codec: Codec | None = None,
    stored: Mapping[int, CodedUnit] = MappingProxyType({}),
    codecs: Mapping[str, Codec] = MappingProxyType({}),
    is_far: Callable[[int], bool] = lambda unit: False,
) -> tuple[Form, ...]:
    """Return the forms of units laid out by `layouts` under a wire and a rule, which says how parameters are aligned and cut.

    `codec` codes the blocks that are not trained in place, but for those that are coded as they come: `stored` says where their
    parts lie, `codecs` has what decodes them.

    Raises:
        ConfigError: the wire trains nothing; or it trains in place what is coded.
    """
    forms = []
    for unit, layout in enumerate(layouts):
        is_block = 1 <= unit <= num_blocks
        trained = wire.trained(unit, layout, is_block=is_block)
        coded = codec if is_block and trained is not layout else None
        own, basis = trained is not None and trained is not layout, None
        if own and trained is not None:
            trained = realigned(trained, rule.parameter_alignment)
            basis = wire.basis(unit, layout, trained) if isinstance(wire, SubspaceWire) else None
        if unit in stored and trained is layout:
            raise ConfigError(
                f"{layout.name}: its weights are coded ({', '.join(sorted(codecs))}), and cannot be trained in place; train "
                "the model that `headrace decompress` makes of it"
            )
        code = stored.get(unit) or (coded_unit(layout, coded, rule.planes) if coded else None)
        decoding = decoding_bytes(code, {**codecs, **({coded.name: coded} if coded else {})}) if code else 0
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
            )
        )
    if not any(form.trained for form in forms) and not isinstance(wire, FrozenWire):
        raise ConfigError(f"wire: {wire.name} trains nothing of this model; give one that does")
    return tuple(forms)


def subspace_notes(forms: Sequence[Form]) -> tuple[str, ...]:
    """Return what a person should know of subspaces that are trained in place of matrices; nothing where none are."""
    whole = sum(form.layout.num_parameters for form in forms)
    core = replaced = 0
    for form in forms:
        if form.basis is None or form.trained is None:
            continue
        own = {spec.name: spec.num_elements for spec in form.trained.parameters}
        smaller = [spec for spec in form.layout.parameters if own[spec.name] < spec.num_elements]
        core += sum(own[spec.name] for spec in smaller)
        replaced += sum(spec.num_elements for spec in smaller)
    if not replaced:
        return ()
    return (
        f"gradient: subspaces have {plain_figure(core / 1e6)} million numbers for {plain_figure(replaced / 1e6)} million of "
        f"matrices; {plain_figure(100 * (whole - replaced) / whole)} % of the parameters are trained as they are",
    )
