"""`headrace clean`: state that dead runs left on SSDs.

Invariant: nothing is removed that a living process holds; nothing that could be resumed, unless asked for.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.spec.sizes import format_bytes
from headrace.store import Leftover, find_leftovers, read_manifest, remove_leftover
from headrace.store.manifest import MANIFEST_NAME, RECORD_NAMES


def clean_up(directories: Sequence[Path], *, unfinished: bool, dry_run: bool) -> Iterator[str]:
    """Remove leftovers in `directories` (SSD or run directories) and yield one line for each, then the total.

    Raises:
        RunDirectoryError: a run directory's manifest is damaged.
    """
    freed_bytes = removed = kept = 0
    for leftover in _leftovers(directories):
        size = format_bytes(leftover.num_bytes)
        if leftover.resumable and not unfinished:
            kept += 1
            yield f"kept     {leftover.folder} ({size}): `headrace resume {leftover.run_directory}` can go on with it"
            continue
        removed += 1
        freed_bytes += leftover.num_bytes
        yield f"{'would remove' if dry_run else 'removed '} {leftover.folder} ({size}) of {leftover.run_directory}"
        if not dry_run:
            remove_leftover(leftover)
            if leftover.resumable:
                _forget(leftover.run_directory)
    verb = "would be " if dry_run else ""
    yield f"{removed} leftover{'' if removed == 1 else 's'} {verb}removed, {format_bytes(freed_bytes)} {verb}freed" + (
        f"; {kept} that can be resumed kept (--unfinished removes them)" if kept else ""
    )


def _leftovers(directories: Sequence[Path]) -> list[Leftover]:
    """Return what lies in SSD directories, and what belongs to run directories wherever it lies; each folder once."""
    found: dict[Path, Leftover] = {}
    for directory in directories:
        mine = find_leftovers([directory])
        if (directory / MANIFEST_NAME).exists():
            everywhere = find_leftovers(read_manifest(directory).directories)
            mine += [leftover for leftover in everywhere if leftover.run_directory == directory.resolve()]
        found |= {leftover.folder.resolve(): leftover for leftover in mine}
    return list(found.values())


def _forget(run_directory: Path) -> None:
    """Remove the records of a state that is gone, so that nobody tries to resume it."""
    for name in (MANIFEST_NAME, *RECORD_NAMES):
        (run_directory / name).unlink(missing_ok=True)
