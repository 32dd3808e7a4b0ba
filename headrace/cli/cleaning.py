"""`headrace clean`: state that dead runs left on SSDs.

Invariant: nothing is removed that a living process holds. What could be resumed, or whose run is not where it was, is only
removed on request.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import headrace
from headrace.process import cache_directory, machine_profile_path
from headrace.store import Leftover, find_leftovers, leftovers_of, lost_commits, remove_leftover
from headrace.store.manifest import MANIFEST_NAME, RECORD_NAMES, UNMADE_NAME
from headrace.terms.errors import ConfigError, RunDirectoryError, StorageError
from headrace.terms.sizes import format_bytes


def clean_all(directories: Sequence[Path], *, cache: bool, unfinished: bool, dry_run: bool) -> Iterator[str]:
    """Remove leftovers in `directories`, and with `cache` what is kept outside runs. Yields and raises as the two do."""
    if directories:
        yield from clean_up(directories, unfinished=unfinished, dry_run=dry_run)
    if cache:
        from headrace.cli.cache_cleaning import Places, clean_cache

        package = Path(headrace.__file__).parent
        places = Places(cache_directory(), machine_profile_path(), package, directories)
        yield from clean_cache(places, unfinished=unfinished, dry_run=dry_run)


def clean_up(directories: Sequence[Path], *, unfinished: bool, dry_run: bool) -> Iterator[str]:
    """Remove leftovers in `directories` (SSD or run directories) and yield one line for each, then the total.

    One folder that cannot be removed does not keep others from being removed.

    Raises:
        RunDirectoryError: a run directory's manifest is damaged.
        StorageError: some could not be removed; it is raised after the last line.
    """
    refused: list[str] = []
    kinds: Counter[str] = Counter()
    freed_bytes = removed = 0
    for leftover in _leftovers(directories):
        size = format_bytes(leftover.num_bytes)
        if (leftover.resumable or leftover.in_doubt) and not unfinished:
            kind, reason = _why_kept(leftover)
            kinds[kind] += 1
            yield f"kept     {leftover.folder} ({size}): {reason}"
            continue
        if not dry_run:
            try:
                remove_leftover(leftover)
            except StorageError as error:
                refused.append(str(error))
                yield f"kept     {leftover.folder} ({size}): cannot be removed"
                continue
            except ConfigError as error:  # a process took it up after it was listed
                yield f"kept     {error}"
                continue
        removed += 1
        freed_bytes += leftover.num_bytes
        yield f"{'would remove' if dry_run else 'removed '} {leftover.folder} ({size}) of {leftover.run_directory}"
    verb = "would be " if dry_run else ""
    kept = [f"{count} {what}" for what, count in sorted(kinds.items())]
    yield f"{removed} leftover{'' if removed == 1 else 's'} {verb}removed, {format_bytes(freed_bytes)} {verb}freed" + (
        f"; {' and '.join(kept)} kept (--unfinished removes them)" if kept else ""
    )
    if refused:
        raise StorageError(f"{'; '.join(refused)}; remove the cause, or clean as their owner")


def _why_kept(leftover: Leftover) -> tuple[str, str]:
    """Return what is kept, in the words of the total, and why."""
    where = leftover.run_directory
    if not leftover.resumable:
        reason = f"its run is not in {where}; it may have been moved, or its drive is not mounted"
        return "whose run is not where it was", reason
    if _has_lost_commits(where):
        return "whose commit records are damaged", f"{' and '.join(RECORD_NAMES)} are damaged in {where}; restore one of them"
    return "that can be resumed", f"`headrace resume {where}` can resume it"


def _has_lost_commits(run_directory: Path) -> bool:
    try:
        return lost_commits(run_directory)
    except (RunDirectoryError, OSError):
        return False  # `resume` reports what is wrong with it


def _leftovers(directories: Sequence[Path]) -> list[Leftover]:
    """Return what lies in SSD directories, and what belongs to run directories wherever it lies; each folder once."""
    found: dict[object, Leftover] = {}
    # A named run directory knows its folders better than they know it.
    for leftover in find_leftovers(directories):
        found[_identity(leftover.folder)] = leftover
    for directory in directories:
        if any((directory / name).exists() for name in (MANIFEST_NAME, UNMADE_NAME)):
            found |= {_identity(leftover.folder): leftover for leftover in leftovers_of(directory)}
    return list(found.values())


def _identity(folder: Path) -> object:
    """Return a value that is equal for a folder by whichever path it is reached."""
    try:
        status = folder.stat()
    except OSError:
        return folder  # gone meanwhile
    return status.st_dev, status.st_ino
