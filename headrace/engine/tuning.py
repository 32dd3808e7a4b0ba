"""How a run's drives are used, where somebody measured what is best for them."""

from headrace.files import file_systems
from headrace.store import StateStore
from headrace.terms.machine.ceilings import Ceilings


def tune(store: StateStore, machine: object) -> None:
    """Let `store` move its bytes as it was measured to be best for the drives, if `machine` was measured."""
    if isinstance(machine, Ceilings):
        drives = set(file_systems(store.manifest.directories))
        store.keep_in_flight(machine.in_flight(len(drives)))
