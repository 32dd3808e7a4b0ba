"""How a run's drives are used, where somebody measured what is best for them."""

from headrace.files import file_systems
from headrace.store import StateStore
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.options import Options


def tune(store: StateStore, options: Options) -> None:
    """Let `store` move its bytes as it was measured to be best for the drives, if somebody measured."""
    if isinstance(options.machine, Ceilings):
        drives = set(file_systems(store.manifest.directories))
        store.keep_in_flight(options.machine.in_flight(len(drives)))
