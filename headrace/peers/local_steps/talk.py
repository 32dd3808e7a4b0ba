"""What a node and a learner send one another: files of a model, rows, and numbers unit by unit.

Invariant: only JSON and flat arrays; nothing is unpickled.
"""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.data import Batch
from headrace.data.batches.open_data import step_tensors_of
from headrace.files.durable import appearing
from headrace.peers.meet.lane import Channel
from headrace.peers.meet.talk import hear, tell
from headrace.terms.errors import PeerLost

NODE, LEARNER = 0, 1
_BLOCK_BYTES = 64 << 20
# What is said after the last unit.
_NO_MORE = "no more units"


def send_units(lane: Channel, to: int, units: Iterator[NDArray[Any]]) -> None:
    """Send the numbers of each unit, after their type and number.

    Raises:
        Unlike: the other side expects others; it has taken none of this unit, and waits for no more.
    """
    for unit in units:
        lane.send(unit, to)
    lane.meet({to: _NO_MORE}, {})


def receive_units(lane: Channel, source: int, counts: Sequence[int], dtype: str) -> Iterator[NDArray[Any]]:
    """Yield the numbers of each unit.

    Raises:
        PeerLost: the other side is gone.
        Unlike: it sends other numbers than these; none of this unit was taken.
    """
    for count in counts:
        unit = np.empty(count, dtype)
        lane.receive(unit, source)
        yield unit
    lane.meet({}, {source: _NO_MORE})


def send_batches(lane: Channel, batches: Sequence[Batch]) -> None:
    """Send rows to a learner."""
    arrays = [{name: tensor.numpy().astype(np.int32) for name, tensor in step_tensors_of(batch).items()} for batch in batches]
    content = zlib.compress(b"".join(array.tobytes() for each in arrays for array in each.values()), 1)
    shapes = [{name: array.shape for name, array in each.items()} for each in arrays]
    tell(lane, {"batches": shapes}, LEARNER, {"rows": torch.frombuffer(bytearray(content), dtype=torch.uint8)})


def receive_batches(lane: Channel) -> list[dict[str, torch.Tensor]]:
    """Return the rows of each step as the engine takes them."""
    words, told = hear(lane, NODE, {"batches": list})
    content = zlib.decompress(told["rows"].numpy().data)
    numbers, start, found = np.frombuffer(content, np.int32).astype(np.int64), 0, []
    for shapes in words["batches"]:
        batch = {}
        for name, shape in shapes.items():
            stop = start + int(np.prod(shape))
            batch[name] = torch.from_numpy(numbers[start:stop].reshape(shape).copy())
            start = stop
        found.append(batch)
    return found


def sizes_of(files: Mapping[str, Path]) -> dict[str, int]:
    """Return the bytes of files by name."""
    return {name: path.stat().st_size for name, path in files.items()}


def file_digests_of(files: Mapping[str, Path]) -> dict[str, str]:
    """Return digests of the files that say what a model is: its configuration and its weights."""
    found = {}
    for name, path in files.items():
        if name == "config.json" or path.suffix == ".safetensors":
            with path.open("rb") as file:
                found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def send_files(lane: Channel, files: Mapping[str, Path]) -> None:
    """Send the content of files to a learner, which has been told `sizes_of` them."""
    for path in files.values():
        for block in _blocks(path.stat().st_size):
            lane.send(np.fromfile(path, np.uint8, block.stop - block.start, offset=block.start), LEARNER)


def receive_files(lane: Channel, sizes: Mapping[str, int], folder: Path) -> None:
    """Make a folder with the node's files, whole or not at all.

    Raises:
        PeerLost: the node is gone, or a name leads out of the folder.
    """
    with appearing(folder) as partial:
        for name, size in sizes.items():
            if Path(name).name != name:
                raise PeerLost(f"the node: sends a file {name!r}, which is no plain name; is it the same version?")
            with (partial / name).open("wb") as file:
                for block in _blocks(size):
                    content = np.empty(block.stop - block.start, np.uint8)
                    lane.receive(content, NODE)
                    file.write(content.data)


def _blocks(size: int) -> Iterator[range]:
    return (range(start, min(start + _BLOCK_BYTES, size)) for start in range(0, size, _BLOCK_BYTES))
