"""What a run is made of that can be exchanged: its wire, its codec, its far site; and the forms of its units under these."""

from dataclasses import dataclass, field

from headrace.codec import Codec, coded_unit, decoding_bytes
from headrace.model import Chain
from headrace.store import StateStore
from headrace.terms.cuts import cuts_of
from headrace.terms.errors import ConfigError, RunDirectoryError
from headrace.terms.forms import Form, home_of
from headrace.terms.layout import realigned
from headrace.terms.rule_figures import RuleFigures
from headrace.update.site import Site
from headrace.update.wire import Wire
from headrace.update.wires import DenseWire


@dataclass(frozen=True)
class Seams:
    """How gradients travel, how frozen weights lie on the drives (None: as compute reads them), and where far units live."""

    wire: Wire = field(default_factory=DenseWire)
    codec: Codec | None = None
    site: Site | None = None

    @property
    def names(self) -> dict[str, str | None]:
        """What a run's state says of them."""
        codec, site = self.codec.name if self.codec else None, self.site.name if self.site else None
        if self.codec and self.codec.digest:  # the same code with other tables is another one
            codec = f"{codec} {self.codec.digest[:16]}"
        return {"wire": self.wire.name, "codec": codec, "site": site}

    @property
    def codecs(self) -> dict[str, Codec]:
        """The codec by its name."""
        return {self.codec.name: self.codec} if self.codec else {}

    def check(self, store: StateStore) -> None:
        """Refuse to go on with a run otherwise than it began.

        Raises:
            RunDirectoryError: it was begun with another wire, codec or site.
        """
        for name, asked in self.names.items():
            if (found := store.manifest.identity.get(name)) != asked:
                raise RunDirectoryError(
                    f"{name}: the run was begun with {found or 'none'}, asked for is {asked or 'none'}; its state means "
                    "something else there: resume it with what it was begun with"
                )


def forms_of(chain: Chain, seams: Seams, rule: RuleFigures) -> tuple[Form, ...]:
    """Return the forms of the units of `chain` under a run's seams and a rule, which says how parameters are aligned and cut.

    Raises:
        ConfigError: the wire trains nothing.
    """
    wire, codec, forms = seams.wire, seams.codec, []
    for unit, layout in enumerate(chain.layouts):
        is_block = 1 <= unit <= chain.num_blocks
        trained = wire.trained(unit, layout, is_block=is_block)
        coded = codec if is_block and trained is not layout else None
        own = trained is not None and trained is not layout
        if own and trained is not None:
            trained = realigned(trained, rule.parameter_alignment)
        code = coded_unit(layout, coded, rule.planes) if coded else None
        making = (decoding_bytes(code, {coded.name: coded}) if code and coded else 0) + (
            wire.making_bytes(layout) if own else 0
        )
        home = home_of(unit, chain.num_blocks)
        cuts = cuts_of(trained, rule) if trained else ()
        far = seams.site is not None and seams.site.holds(unit)
        forms.append(Form(layout=layout, trained=trained, home=home, code=code, making_bytes=making, cuts=cuts, is_far=far))
    if not any(form.trained for form in forms):
        raise ConfigError(f"wire: {wire.name} trains nothing of this model; give one that does")
    return tuple(forms)
