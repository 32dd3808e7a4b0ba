"""The stages of a run: a fleet whose ranks hold whole units, and pass hidden states and their gradients to their neighbours.

Stage 0 leads, as rank 0 of a fleet does: it alone has model and data. Commits, import and export are those of a fleet.
"""

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from headrace.ask.planner import RunPlanner
from headrace.machine.host_memory import Bytes
from headrace.model import Chain
from headrace.peers.meet.lane import bytes_of
from headrace.peers.meet.ranks import Ranks
from headrace.peers.meet.relay import Relay
from headrace.peers.meet.talk import agree
from headrace.peers.ranks.fleet import LEADER, Fleet
from headrace.peers.stages.cuts import checked_cuts, even_cuts
from headrace.peers.stages.passing_check import refuse_what_passes_more
from headrace.peers.stages.stage_shares import StageShares
from headrace.plan.search.serving import grouping_of
from headrace.plan.value.plan import Plan
from headrace.plan.value.stage_place import StagePlace
from headrace.terms.errors import ConfigError
from headrace.terms.lanes import Peer
from headrace.terms.options.options import Options
from headrace.terms.shards import StageShare

# The lanes that stages need.
LANES = ("onward", "back", "table", "norm", "commit", "control")
_INT8_TOP = 127.0
_CUTS = "cuts"


class Line(Fleet):
    """The stages that meet over `ranks`. `begin_step` comes first; a step ends in all or in none."""

    by_stages = True
    peer = Peer.STAGE

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        left, right = (None if rank not in range(self.size) else rank for rank in (self.rank - 1, self.rank + 1))
        self._changed = threading.Condition()
        self._onward = Relay(ranks.lanes["onward"], self._changed, source=left, to=right)
        self._back = Relay(ranks.lanes["back"], self._changed, source=right, to=left)
        self._in_8_bits, self._dtype = False, torch.float32
        self._shapes: dict[str, list[Sequence[tuple[int, ...]]]] = {"onward": [], "back": []}
        self._group_bytes = 0
        self.stage_shares = StageShares()
        self.num_groups = 1  # of the newest step

    # -- how the run is cut ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """See `Fleet.name`."""
        return f"{self.size} stages"

    @property
    def terms(self) -> dict[str, Any]:
        """See `Fleet.terms`."""
        return {_CUTS: "+".join(map(str, self._share.cuts))}

    @property
    def _share(self) -> StageShare:
        assert isinstance(self.share, StageShare), "it is cut before anything is stored"
        return self.share

    def settle_on(self, options: Options, planner: RunPlanner, chain: Chain) -> None:
        """Cut the run as `options` say, else so that the slowest stage has least to compute; `planner` plans for stage 0.

        Raises:
            ConfigError: there are not as many cuts as stages need, or a stage would have no block.
            ModelError: its blocks pass on more than hidden states.
        """
        if chain.collects_asides:
            raise ConfigError(
                f"{type(chain.model).__name__} has router losses of a whole step, which stages do not gather. Train on one "
                "machine, or leave them out: router_aux_loss_coef 0"
            )
        refuse_what_passes_more(chain.config)
        self._in_8_bits = options.stage_dtype == "int8"
        if options.tokens_per_step is None:
            return
        num_blocks = chain.num_blocks
        cuts = options.cuts or even_cuts(planner.block_flops(options.sequence_length or options.tokens_per_step), self.size)
        cuts = checked_cuts(cuts, self.size, num_blocks)
        self.share = StageShare(self.rank, self.size, cuts)
        planner.be_stage(StagePlace.of(self.rank, cuts, num_blocks, tied=chain.tied))

    def follow_plan(self, planner: RunPlanner, leaders: Plan, chain: Chain) -> None:
        """Let `planner` plan for this stage, with the groups of sums and of micro-batches that stage 0 has."""
        grouping, stage = grouping_of(leaders), leaders.stage
        assert grouping is not None, "a plan that computes groups sums"
        assert stage is not None, "stage 0 has its own plan"
        planner.group(grouping)
        place = StagePlace.of(self.rank, self._share.cuts, chain.num_blocks, tied=chain.tied, most_groups=stage.groups)
        planner.be_stage(place, leaders.updates.chunk_elements)

    def agree(self, terms: Mapping[str, Any], options: Options) -> None:
        """See `Fleet.agree`."""
        self._in_8_bits = options.stage_dtype == "int8"
        cuts = tuple(int(cut) for cut in str(terms.get(_CUTS) or "").split("+") if cut)
        if len(cuts) == self.size - 1:  # else the run was begun otherwise, which its seams say
            self.share = StageShare(self.rank, self.size, cuts)

    def planned_options(self, options: Options) -> Options:
        """See `Fleet.planned_options`: stages add no gradients."""
        return options

    def share_of_step(self, planner: RunPlanner, step: tuple[int, int], way: str, **at: Any) -> tuple[int, int]:
        """See `Fleet.share_of_step`: each stage has all of it."""
        return step

    def shared_plan(self, plan: Plan) -> Plan:
        """See `Fleet.shared_plan`: a stage has whole units."""
        return plan

    def blocks(self, num_blocks: int) -> range:
        """Return the units of this stage's blocks."""
        return self._share.blocks(num_blocks)

    # -- what passes between stages -------------------------------------------------------------------------------------

    def begin_step(self, shapes: Sequence[Sequence[tuple[int, ...]]], dtype: torch.dtype, *, back: bool) -> None:
        """Prepare for hidden states of these shapes by group and micro-batch; with `back` their gradients return."""
        self._dtype, self.num_groups = dtype, len(shapes)
        self._group_bytes = max(sum(map(self._num_bytes, group)) for group in shapes)
        for kind, relay, is_wanted in (
            ("onward", self._onward, self.rank > 0),
            ("back", self._back, back and self.rank < self.size - 1),
        ):
            self._shapes[kind] = list(shapes) if is_wanted else []
            for group in self._shapes[kind]:
                relay.expect(sum(map(self._num_bytes, group)))

    def next_kind(self, *, onward: bool, back: bool) -> str:
        """Wait until something that is wanted has come; return "back" or "onward", the first if both have."""

        def come() -> str:
            if self._back.has_come and back:
                return "back"
            return "onward" if onward and (self._onward.has_come or self.rank == 0) else ""

        with self._changed:
            self._changed.wait_for(come)
            return come()

    def take(self, kind: str) -> list[torch.Tensor]:
        """Return the tensors of the next group that came, in host memory."""
        data, start, found = self._relay(kind).take(), 0, []
        for shape in self._shapes[kind].pop(0):
            found.append(self._decoded(data[start : (start := start + self._num_bytes(shape))], shape))
        return found

    def give(self, kind: str, tensors: Sequence[torch.Tensor]) -> None:
        """Send a group's tensors to the neighbour, in the background."""
        self._relay(kind).give(torch.cat([self._encoded(tensor) for tensor in tensors]).numpy())

    def all_square_sums(self, own: dict[int, float]) -> dict[int, float]:
        """Return the square sums of all stages' units: all to stage 0, and from it to all."""
        found = agree(self.ranks.lanes["norm"], {"sums": list(own.items())}, {"sums": list})
        return {int(unit): float(total) for each in found for unit, total in each["sums"]}

    def say_names(self, names: Sequence[str]) -> None:
        """Tell the first stage of which parameters the next tables are."""
        self.ranks.lanes["table"].send_message(list(names), LEADER)

    def hear_names(self) -> list[str]:
        """Return what the last stage says so."""
        return [str(name) for name in self.ranks.lanes["table"].receive_message(self.size - 1)]

    def send_table(self, table: torch.Tensor) -> None:
        """Send what belongs to a tied matrix from the one end to the other."""
        self.ranks.lanes["table"].send(table.detach().cpu().contiguous(), self.size - 1 if self.leads else LEADER)

    def receive_table(self, table: torch.Tensor) -> None:
        """Fill `table` with what the other end sends."""
        into = torch.empty(table.shape, dtype=table.dtype)
        self.ranks.lanes["table"].receive(into, self.size - 1 if self.leads else LEADER)
        table.copy_(into)

    @property
    def transfer_seconds(self) -> float:
        """Seconds in which a group came from a neighbour, where it was slowest, without waiting for the sender."""
        rates = [relay.bytes_per_second for relay in (self._onward, self._back) if relay.bytes_per_second]
        return self._group_bytes / min(rates) if rates else 0.0

    def close(self) -> None:
        """End what moves bytes in the background."""
        self._onward.close()
        self._back.close()

    # -- as numbers cross -----------------------------------------------------------------------------------------------

    def _relay(self, kind: str) -> Relay:
        return self._onward if kind == "onward" else self._back

    def _num_bytes(self, shape: tuple[int, ...]) -> int:
        if self._in_8_bits:
            return prod(shape) + 4 * prod(shape[:-1])
        return prod(shape) * self._dtype.itemsize

    def _encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._in_8_bits:
            return bytes_of(tensor.detach().cpu())
        rows = tensor.detach().float()
        scales = rows.abs().amax(dim=-1, keepdim=True) / _INT8_TOP
        codes = (rows / torch.where(scales > 0, scales, 1.0)).round().to(torch.int8)
        # What is not finite stays so: its row's scale is not finite either.
        return torch.cat([bytes_of(each.cpu()) for each in (scales, codes)])

    def _decoded(self, data: Bytes, shape: tuple[int, ...]) -> torch.Tensor:
        flat = torch.from_numpy(data)
        if not self._in_8_bits:
            return flat.view(self._dtype).view(shape)
        split = 4 * prod(shape[:-1])
        scales = flat[:split].view(torch.float32).view(*shape[:-1], 1)
        return (flat[split:].view(torch.int8).view(shape).float() * scales).to(self._dtype)
