"""Are weights read from the model's files, or from a copy striped over the given drives? Decided once, for a plan.

A copy is made if it is asked for. Without a word it is made if each pass reads weights, and the drives together read a quarter
faster than the model's own files. One that is there is used.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from headrace.files import measured_reading, measured_stripes, on_drives_of
from headrace.generate.passes.sources import GenerationSource, ShardSource
from headrace.generate.plan.plan import GenerationPlan
from headrace.store.copied_files import WeightFiles
from headrace.store.weight_copy import WeightCopy
from headrace.terms.events import Notice, Sink
from headrace.terms.sizes import MIB, format_bytes, format_seconds

# Less is as much as two measurements of one drive may differ.
_LEAST_GAIN = 1.25
_TRIAL_BYTES = 64 * MIB


class Copying:
    """The copy of a model's weights in `directories`. `asked`: whether to make one, None for where it pays."""

    def __init__(self, directories: Sequence[Path], asked: bool | None, sink: Sink) -> None:
        self._directories, self._asked, self._sink = tuple(directories), asked, sink
        self._settled = asked is False or not self._directories

    def settle(self, source: GenerationSource, plan: GenerationPlan) -> None:
        """Have `source` read from the copy, if there is one or it pays for `plan`; then it is made first.

        Raises:
            DiskFull: a drive has not the space; nothing is left there.
            StorageError: something cannot be read or written; what is copied is kept.
        """
        if self._settled:
            return
        if not isinstance(source, ShardSource) or not source.paths:
            reason = "they are made anew for each pass" if isinstance(source, ShardSource) else "the run has them on its drives"
            self._leave(f"weights are not copied: {reason}")
            return
        copy = WeightCopy(WeightFiles.of(source.paths), self._directories)
        if not copy.is_whole:
            if self._asked is None and (plan.forecast is None or not plan.forecast.read_bytes):
                return  # another plan may read weights in each pass
            if self._asked is None and (reason := why_no_copy(source.paths, self._directories)):
                self._leave(f"weights are read where they lie: {reason}")
                return
            self._make(copy, source.paths)
        source.read_by(copy.reader(self._sink))
        self._leave(f"weights are read from their copy in {_named(copy.folders)}")

    def _make(self, copy: WeightCopy, paths: Sequence[Path]) -> None:
        stripes = measured_stripes(self._directories, min(_TRIAL_BYTES, copy.files.num_bytes))
        total = copy.files.num_bytes
        left = total - copy.copied_bytes
        rate = min(stripes.write_bytes_per_second, measured_reading(paths))
        seconds = left / rate + total / stripes.read_bytes_per_second
        begun = f", of which {format_bytes(total - left)} are there" if left < total else ""
        removing = f"rm -r {shlex.join(map(str, copy.folders))}"
        self._say(
            f"weights: {format_bytes(total)}{begun} are copied to {_named(copy.folders)}, striped, and read back: about "
            f"{format_seconds(seconds)}, once. The same command resumes an interrupted copy; `{removing}` removes it"
        )
        for folder in copy.outdated():
            self._say(f"weights: {folder} is a copy from before the files were changed; nothing reads it, remove it")
        copy.make(stripes.weights, self._sink)

    def _leave(self, text: str) -> None:
        self._settled = True
        self._say(text)

    def _say(self, text: str) -> None:
        self._sink(Notice(text=text, level="info"))


def why_no_copy(paths: Sequence[Path], directories: Sequence[Path]) -> str:
    """Return why a copy of files in `directories` would not be read faster than they are; empty where it would."""
    if on_drives_of(paths, directories):
        return "the drives that were named have them already"
    size = min(_TRIAL_BYTES, max(path.stat().st_size for path in paths))
    copied, in_place = measured_stripes(directories, size).read_bytes_per_second, measured_reading(paths)
    if copied >= _LEAST_GAIN * in_place:
        return ""
    return f"a copy would be read at {format_bytes(round(copied))}/s, they are at {format_bytes(round(in_place))}/s"


def _named(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))
