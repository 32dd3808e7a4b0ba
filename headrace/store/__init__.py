"""Where each plane of each unit lives on SSD: slots, commits, checksums, scratch."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.store.assembly import StoreRequest as StoreRequest
    from headrace.store.assembly import lost_commits as lost_commits
    from headrace.store.assembly import make_run_directory as make_run_directory
    from headrace.store.checksum import checksum_reference as checksum_reference
    from headrace.store.leftovers import Leftover as Leftover
    from headrace.store.leftovers import find_leftovers as find_leftovers
    from headrace.store.leftovers import leftovers_of as leftovers_of
    from headrace.store.leftovers import remove_leftover as remove_leftover
    from headrace.store.leftovers import remove_uncommitted as remove_uncommitted
    from headrace.store.leftovers import remove_unmade as remove_unmade
    from headrace.store.lock import RunLock as RunLock
    from headrace.store.lock import lock_holder as lock_holder
    from headrace.store.manifest import Manifest as Manifest
    from headrace.store.manifest import read_manifest as read_manifest
    from headrace.store.places import FamilyPlace as FamilyPlace
    from headrace.store.places import Places as Places
    from headrace.store.places import place_units as place_units
    from headrace.store.replacing import discard_store as discard_store
    from headrace.store.replacing import finish_replacing as finish_replacing
    from headrace.store.replacing import place_of_new as place_of_new
    from headrace.store.replacing import replace_store as replace_store
    from headrace.store.run_folders import OpenFile as OpenFile
    from headrace.store.run_folders import open_direct as open_direct
    from headrace.store.shard_store import ShardStore as ShardStore
    from headrace.store.state_store import StateStore as StateStore
    from headrace.store.verify import Progress as Progress

__getattr__ = lazy_face(__name__)
