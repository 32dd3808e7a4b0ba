"""What a run trains and how its frozen weights lie: the forms of its units under a wire and a codec, and whether these are the
same when it goes on.
"""

from headrace.codec import Codec
from headrace.model import Chain
from headrace.store import StateStore
from headrace.terms.cuts import cuts_of
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.forms import Form, home_of
from headrace.terms.layout import realigned
from headrace.terms.rule_figures import RuleFigures
from headrace.update.wire import Wire
from headrace.update.wires import DenseWire


def seams(wire: Wire | None, codec: Codec | None) -> dict[str, str | None]:
    """Return what a run's state says of how its gradients travel and its frozen weights lie."""
    return {"wire": (wire or DenseWire()).name, "codec": codec.name if codec else None}


def check_seams(store: StateStore, wire: Wire | None, codec: Codec | None) -> None:
    """Refuse to go on with a run otherwise than it began."""
    for name, asked in seams(wire, codec).items():
        if (found := store.manifest.identity.get(name)) != asked:
            raise RunDirectoryError(
                f"{name}: the run was begun with {found or 'none'}, asked for is {asked or 'none'}; its state means something "
                "else there: resume it with what it was begun with"
            )


def forms_of(chain: Chain, wire: Wire, codec: Codec | None, rule: RuleFigures) -> tuple[Form, ...]:
    """Return the forms of the units of `chain` under a wire, a codec and a rule, which says how parameters are aligned and cut.

    Raises:
        ConfigError: the wire trains nothing.
    """
    forms = []
    for unit, layout in enumerate(chain.layouts):
        is_block = 1 <= unit <= chain.num_blocks
        trained = wire.trained(unit, layout, is_block=is_block)
        coded = codec if is_block and trained is not layout else None
        own = trained is not None and trained is not layout
        if own and trained is not None:
            trained = realigned(trained, rule.parameter_alignment)
        making = (coded.decoding_bytes(layout.num_elements) if coded else 0) + (wire.making_bytes(layout) if own else 0)
        home = home_of(unit, chain.num_blocks)
        code = coded.planes if coded else None
        cuts = cuts_of(trained, rule) if trained else ()
        forms.append(Form(layout=layout, trained=trained, home=home, code=code, making_bytes=making, cuts=cuts))
    if not any(form.trained for form in forms):
        raise ConfigError(f"wire: {wire.name} trains nothing of this model; give one that does")
    return tuple(forms)
