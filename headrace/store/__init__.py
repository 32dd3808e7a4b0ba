"""Where each plane of each unit lives on SSD: slots, commits, checksums, scratch."""

from headrace.store.assembly import StoreRequest, lost_commits, make_run_directory
from headrace.store.checksum import checksum, checksum_reference
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
from headrace.store.run_folders import OpenFile, open_direct
from headrace.store.state_store import StateStore
from headrace.store.verify import Progress

__all__ = [
    "FamilyPlace",
    "Leftover",
    "Manifest",
    "OpenFile",
    "Places",
    "Progress",
    "RunLock",
    "StateStore",
    "StoreRequest",
    "checksum",
    "checksum_reference",
    "find_leftovers",
    "leftovers_of",
    "lock_holder",
    "lost_commits",
    "make_run_directory",
    "open_direct",
    "place_units",
    "read_manifest",
    "remove_leftover",
    "remove_uncommitted",
    "remove_unmade",
]
