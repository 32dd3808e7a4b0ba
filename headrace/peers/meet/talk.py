"""What peers say to one another over a lane: words, a JSON object, with numbers whose types and shapes the words name first."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from headrace.peers.meet.lane import Channel, bytes_of, has_keys
from headrace.terms.errors import PeerLost, Unlike

# Among the words: the type and the shape of each of the numbers, by name.
_NUMBERS = "numbers"


def tell(lane: Channel, words: Mapping[str, Any], to: int, numbers: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
    """Send words to a rank, with `numbers` by name. Raises as `Channel.send`."""
    described = {name: [str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in numbers.items()}
    lane.send_message({**words, _NUMBERS: described}, to)
    if numbers:
        lane.send(torch.cat([bytes_of(each) for each in numbers.values()]), to)


def hear(
    lane: Channel, source: int, keys: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what a rank tells: words with these `keys` of these types, and numbers.

    Raises:
        PeerLost, Unlike: see `Channel.receive_message`.
    """
    words = lane.receive_message(source, {**keys, _NUMBERS: dict})
    try:
        found = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, (kind, shape) in words.pop(_NUMBERS).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):
        raise Unlike(f"{lane.names[source]}: tells of numbers that there cannot be; is it the same version?") from None
    if found:
        content = torch.empty(sum(each.nbytes for each in found.values()), dtype=torch.uint8)
        lane.receive(content, source)
        for each, part in zip(found.values(), torch.split(content, [each.nbytes for each in found.values()]), strict=True):
            bytes_of(each).copy_(part)
    return words, found


def gather(lane: Channel, value: Any, keys: Mapping[str, Any] | None = None, ranks: Sequence[int] = ()) -> list[Any]:
    """Return at the first of `ranks` (all) what each has to say, objects with these `keys`; at the others only their own."""
    first, *others = ranks or range(lane.size)
    if lane.rank == first:
        return [value, *(lane.receive_message(rank, keys) for rank in others)]
    lane.send_message(value, first)
    return [value]


def agree(
    lane: Channel, words: Mapping[str, Any], keys: Mapping[str, Any], ranks: Sequence[int] = ()
) -> list[Mapping[str, Any]]:
    """Return, at each of `ranks` (all), what each tells all others: objects with these `keys`, in the order of ranks.

    Raises:
        PeerLost, Unlike: see `Channel.receive_message`.
    """
    ranks = ranks or range(lane.size)
    found = gather(lane, words, keys, ranks)
    if lane.rank != ranks[0]:
        found = lane.receive_message(ranks[0], {"all": list})["all"]
        if len(found) != len(ranks) or not all(has_keys(each, keys) for each in found):
            raise PeerLost(f"{lane.names[ranks[0]]}: tells what makes no sense; is it the same version?")
        return list(found)
    for rank in ranks[1:]:
        lane.send_message({"all": found}, rank)
    return found
