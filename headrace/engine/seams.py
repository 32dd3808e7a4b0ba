"""The exchangeable parts of a run: its wire (how gradients travel), its codec, its far site; and the forms of units under
these.
"""

from dataclasses import dataclass, field

from headrace.codec import Codec
from headrace.engine.company import Company
from headrace.flow.step.serve import Workers
from headrace.losses import Loss, TokenLoss, loss_of
from headrace.model import Chain
from headrace.store import StateStore
from headrace.terms.errors import RunDirectoryError
from headrace.terms.forms import Form
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.options.options import Options
from headrace.terms.rule_figures import RuleFigures
from headrace.update.sites.site import Site
from headrace.update.wires import DenseWire, wire_of
from headrace.update.wires.forms import Coding, forms_under
from headrace.update.wires.stored_codes import StoredCodes
from headrace.update.wires.wire import Wire


@dataclass(frozen=True)
class Seams:
    """How gradients travel, how frozen weights lie on the drives (None: as compute reads them), and where far units live.

    `workers` belong to a node, which computes nothing itself. A `fleet` are ranks that share out every unit. `token_loss` is a
    loss of the whole step (`headrace.losses`). `parted`: experts are parts also where whole blocks have room.
    """

    wire: Wire = field(default_factory=DenseWire)
    codec: Codec | None = None
    site: Site | None = None
    workers: Workers | None = None
    fleet: Company | None = None
    token_loss: TokenLoss | None = None
    parted: bool = False

    @property
    def names(self) -> dict[str, str | None]:
        """Their names in a run's state."""
        codec, site = self.codec.name if self.codec else None, self.site.name if self.site else None
        if self.codec and self.codec.digest:  # the same code with other tables counts as another one
            codec = f"{codec} {self.codec.digest[:16]}"
        names = {"wire": self.wire.name, "codec": codec, "site": site, "workers": "node" if self.workers else None}
        names["ranks"] = self.fleet.name if self.fleet else None
        names |= self.fleet.terms if self.fleet else {}
        return names | ({"loss": self.loss_name} if self.token_loss else {})

    @property
    def company(self) -> dict[str, Company | None]:
        """With whom a step's parts work: ranks that share out every unit, or stages."""
        return {"line" if self.fleet and self.fleet.by_stages else "peers": self.fleet}

    @property
    def loss_name(self) -> str:
        """What the loss of the whole step is called."""
        loss = self.token_loss
        return loss.text if isinstance(loss, Loss) else getattr(loss, "__qualname__", type(loss).__name__)

    @property
    def codecs(self) -> dict[str, Codec]:
        """The codec by its name; {} where there is none."""
        return {self.codec.name: self.codec} if self.codec else {}

    def check(self, store: StateStore) -> None:
        """Refuse to resume a run in another way than it began.

        Raises:
            RunDirectoryError: it was begun with another wire, codec or site; or one was begun by a node and the other is not.
        """
        for name, asked in ({"loss": None} | self.names).items():
            found = store.manifest.identity.get(name)
            if name == "ranks" and str(found).isdecimal() and str(asked).isdecimal():
                continue  # another number of ranks shares out the state anew
            if found != asked:
                raise RunDirectoryError(
                    f"{name}: the run was begun with {found or 'none'}, asked for is {asked or 'none'}. Its state means "
                    "something else there: resume it with what it was begun with"
                )


def forms_of(
    chain: Chain,
    seams: Seams,
    rule: RuleFigures,
    optimizer: Optimizer,
    stored: StoredCodes | None = None,
    *,
    on_host: bool = True,
) -> tuple[Form, ...]:
    """Return the forms of the units of `chain` under a run's seams and a rule. The `optimizer` says what is trained at all.
    `stored` says which blocks the model's files already hold coded.

    `on_host`: the host computes, and decodes.

    Raises:
        ConfigError: nothing is trained, or a coded unit would be trained in place.
    """
    site = seams.site
    holds = site.holds if site is not None else lambda unit: False
    coding = Coding(seams.codec, stored or StoredCodes(), on_host)
    return forms_under(chain.layouts, chain.num_blocks, seams.wire, rule, optimizer, coding, holds)


def seams_of(options: Options, begun: str | None = None) -> Seams:
    """Return the seams that a run's options name. For a run that was `begun`, take the wire of that name.

    Raises:
        ConfigError: there is no wire of that name, or it has no such setting.
    """
    return Seams(wire_of(options, begun), token_loss=loss_of(options.loss))
