"""Where each plane of each unit lives on SSD: slots, commits, checksums, scratch."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.store.assembly import StoreRequest, lost_commits, make_run_directory
    from headrace.store.checksum import checksum_reference
    from headrace.store.leftovers import (
        Leftover,
        find_leftovers,
        leftovers_of,
        remove_leftover,
        remove_uncommitted,
        remove_unmade,
    )
    from headrace.store.lock import RunLock, lock_holder
    from headrace.store.manifest import Manifest, read_manifest
    from headrace.store.places import FamilyPlace, Places, place_units
    from headrace.store.replacing import discard_store, finish_replacing, place_of_new, replace_store
    from headrace.store.run_folders import OpenFile, open_direct
    from headrace.store.shard_store import ShardStore
    from headrace.store.state_store import StateStore
    from headrace.store.verify import Progress

__getattr__ = lazy_face(__name__)
