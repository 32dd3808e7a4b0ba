"""What coded keys and values do to attention: the last token of a prompt attends to them, and to what they were made of."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from headrace.model.caches.tiered_cache import Pair, TieredLayer
from headrace.model.seats.host_attention import AttentionCall, named, using


class AttentionErrors:
    """Measures each of `blocks` in its first pass, which is that of the first seat; gives `tell` one line when all are done.

    `name` is that of the code.
    """

    def __init__(self, name: str, blocks: Sequence[int], tell: Callable[[str], None]) -> None:
        self._name, self._tell = name, tell
        self._found: dict[int, float | None] = dict.fromkeys(blocks)
        self._left = set(blocks)
        if not blocks:
            tell(self._words())

    def wants(self, number: int) -> bool:
        """Return whether that block is still to be measured."""
        return number in self._left

    @contextmanager
    def of(self, number: int, block: nn.Module, layer: TieredLayer, memory: torch.Tensor) -> Iterator[None]:
        """While entered, `block` can be run with `layer`, whose tokens go into `memory`; it is measured."""
        self._left.remove(number)
        compared = _Compared(layer, memory)
        with named(block), using(compared), layer.attended(compared):
            yield
        self._found[number] = compared.error
        if not self._left:
            self._tell(self._words())

    def _words(self) -> str:
        found = {block: error for block, error in self._found.items() if error is not None}
        if not found:
            return f"caches in {self._name} are lossy; what that does to this architecture's attention is not measured"
        mean = (sum(error**2 for error in found.values()) / len(found)) ** 0.5
        worst = max(found, key=lambda block: found[block])
        return (
            f"caches in {self._name} are lossy: attention of the first prompt's last token is off by {mean:.2%} of its norm "
            f"(root mean square of {len(found)} blocks), {found[worst]:.2%} in block {worst}"
        )


class _Compared:
    """A use of a block that computes attention as usual, and compares what the last token gets of decoded keys and values."""

    def __init__(self, layer: TieredLayer, memory: torch.Tensor) -> None:
        self.error: float | None = None
        self._layer, self._memory = layer, memory
        self._given: Pair | None = None

    def take(self, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """See `Elsewhere`."""
        self._given = self._layer.taken(self._memory, keys, values)
        return self._given

    def attend(self, asked: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See `Use`."""
        found: torch.Tensor = asked.function(asked.module, asked.query, keys, values, asked.mask, **asked.arguments)[0]
        given, self._given = self._given, None
        known = given is not None and keys is given[0] and values is given[1]
        if known and asked.arguments.get("position_bias") is None:
            mask = asked.mask if asked.mask is None else asked.mask[:, :, -1:]
            last = replace(asked, query=asked.query[:, :, -1:], mask=mask)
            exact, coded = _attended(last, keys, values), _attended(last, *self._layer.read(self._memory))
            self.error = float((coded - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float32).tiny))
        return found


def _attended(asked: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = asked.function(asked.module, asked.query, keys, values, asked.mask, **asked.arguments)[0]
    return found.float()
