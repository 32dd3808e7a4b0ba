"""The forms of a model's units under what a run is made of: its wire, its codec, where far units live, and its rule."""

from collections.abc import Callable, Sequence

from headrace.codec import Codec, coded_unit, decoding_bytes
from headrace.terms.cuts import cuts_of
from headrace.terms.errors import ConfigError
from headrace.terms.forms import Form, home_of
from headrace.terms.layout import UnitLayout, realigned
from headrace.terms.rule_figures import RuleFigures
from headrace.update.wire import SubspaceWire, Wire


def forms_under(
    layouts: Sequence[UnitLayout],
    num_blocks: int,
    wire: Wire,
    rule: RuleFigures,
    codec: Codec | None = None,
    is_far: Callable[[int], bool] = lambda unit: False,
) -> tuple[Form, ...]:
    """Return the forms of units laid out by `layouts` under a wire and a rule, which says how parameters are aligned and cut.

    Raises:
        ConfigError: the wire trains nothing.
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
        code = coded_unit(layout, coded, rule.planes) if coded else None
        decoding = decoding_bytes(code, {coded.name: coded}) if code and coded else 0
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
    if not any(form.trained for form in forms):
        raise ConfigError(f"wire: {wire.name} trains nothing of this model; give one that does")
    return tuple(forms)
