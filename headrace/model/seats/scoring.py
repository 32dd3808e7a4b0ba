"""Scoring: a micro-batch goes through the blocks once, for the loss of its labelled tokens; and what that costs.

It takes the place of a seat in a pass, and needs no thread. The parts of training run what lies before and after the blocks.
Invariant: the logits never exist whole.
"""

from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from headrace.model.blocks.chain_values import IGNORED, MicroBatch, shift_labels
from headrace.model.blocks.on_shapes import either_answer
from headrace.model.blocks.taps import BlockCall
from headrace.model.chain.chain import Chain
from headrace.model.costs.cost_meter import CostMeter
from headrace.model.costs.shape_costs import batch_on_shapes
from headrace.model.parts.runner import left_as_found
from headrace.model.seats.generation_costs import block_costs, ends_bound, experts_at_once
from headrace.model.seats.seats import PromptPart
from headrace.terms.costs import GenerationCosts
from headrace.terms.errors import refusing
from headrace.terms.sizes import MIB

# Bytes of the float32 logits of one chunk of positions.
_LOGIT_BYTES = 64 * MIB


def chunk_positions(chain: Chain, rows: int) -> int:
    """Return for how many positions of `rows` rows logits exist at once."""
    return max(1, _LOGIT_BYTES // (4 * chain.vocabulary * rows))


class ScoringSeat:
    """One micro-batch on its way. Its first turn runs what lies before the blocks, the next one what lies after them.

    Attributes:
        calls, hidden, done: as of a `Seat`.
        loss_sum: the sum of the labelled tokens' cross-entropies, float64, once it is done.
    """

    def __init__(self, chain: Chain, batch: MicroBatch) -> None:
        self.calls: Sequence[BlockCall] = ()
        self.earlier: Sequence[PromptPart] = ()
        self.hidden: torch.Tensor | None = None
        self.done, self.loss_sum = False, 0.0
        self._chain = chain
        self._batch = on_device(chain.device, batch)

    def turn(self) -> None:
        """Run what comes next, until it wants the blocks or is done. On all turns but the first, the blocks have been run."""
        if self.hidden is None:
            start = self._chain.prologue(self._batch)
            self.hidden, self.calls = start.hidden, start.calls
            return
        self._score(self.hidden)
        self.done, self.hidden, self.calls = True, None, ()

    def _score(self, hidden: torch.Tensor) -> None:
        self.loss_sum = loss_sum(self._chain, self._batch, hidden)

    def close(self) -> None:
        """End it where it is: nothing is under way between turns."""


class ContinuationSeat(ScoringSeat):
    """Scores given tokens: `targets` (b, C) follow the positions of `batch`, IGNORED where nothing is scored.

    Attributes:
        scores: once it is done, of each row the sum of its targets' log-probabilities, and whether each is the likeliest.
    """

    def __init__(self, chain: Chain, batch: MicroBatch, targets: torch.Tensor) -> None:
        super().__init__(chain, batch)
        self.scores: tuple[tuple[float, bool], ...] = ()
        self._targets = targets.to(chain.device)

    def _score(self, hidden: torch.Tensor) -> None:
        ids, scored = self._batch.input_ids, self._targets != IGNORED
        found, likeliest = torch.zeros(ids.shape, dtype=torch.float32), torch.ones(ids.shape, dtype=torch.bool)
        step, wanted = chunk_positions(self._chain, ids.shape[0]), scored.any(dim=0).tolist()
        for start in range(0, ids.shape[1], step):
            span = slice(start, start + step)
            if any(wanted[span]):
                logits, targets = self._chain.logits(ids[:, span], hidden[:, span]), self._targets[:, span]
                likeliest[:, span] = (logits.argmax(dim=-1) == targets).cpu()
                places = targets.clamp(min=0).unsqueeze(-1)
                found[:, span] = logits.log_softmax(dim=-1).gather(-1, places).squeeze(-1).cpu()
        rows = zip(found, likeliest, scored.cpu(), strict=True)
        self.scores = tuple((float(each[where].sum()), bool(first[where].all())) for each, first, where in rows)


def loss_sum(chain: Chain, batch: MicroBatch, hidden: torch.Tensor) -> float:
    """Return the sum of the cross-entropies of the labelled tokens of `batch`, which is where `chain` computes."""
    ids, targets = batch.input_ids, shift_labels(batch.labels)
    labelled = (targets != IGNORED).any(dim=0).tolist()
    step, total = chunk_positions(chain, ids.shape[0]), 0.0
    for start in range(0, ids.shape[1], step):
        span = slice(start, start + step)
        if any(labelled[span]):
            total += float(chain.loss_sum(ids[:, span], hidden[:, span], targets[:, span]).double())
    return total


def on_device(device: torch.device, batch: MicroBatch) -> MicroBatch:
    """Return `batch` with its tensors on `device`."""
    values = (batch.input_ids, batch.labels, batch.attention_mask, batch.position_ids, batch.token_mask)
    return MicroBatch(*(None if value is None else value.to(device) for value in values))  # type: ignore[arg-type]


def scoring_costs(chain: Chain, rows: int, length: int) -> GenerationCosts:
    """Return the costs of scoring `rows` rows of `length` tokens: one pass without caches, with all logits in chunks.

    The chain must be ready to generate. Each of its passes is a first one.

    Raises:
        ModelError: the model's code asks for values, which fake tensors do not have.
    """
    with (
        refusing(f"{type(chain.model).__name__}: a measurement of its loss cannot be planned: it fails on shapes alone"),
        experts_at_once(chain.model),
        left_as_found(chain.model.modules()),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        ends_bound(chain),
    ):
        batch = batch_on_shapes(chain, rows, length, positions=True)
        ids = batch.input_ids
        start = either_answer(lambda: chain.prologue(batch), lambda start: start.calls)
        passed, hidden = block_costs(chain, DynamicCache(), start.hidden, start.calls)
        chunk = min(length, chunk_positions(chain, rows))
        meter = CostMeter(chain.wide_products, (hidden,))
        with meter:
            chain.loss_sum(ids[:, :chunk], hidden[:, :chunk], ids[:, :chunk])
    none = (0,) * chain.num_blocks
    head = chain.model.get_output_embeddings().weight
    return GenerationCosts(
        rows=rows,
        prompt_length=length,
        first=passed,
        next=passed,
        cache_bytes=none,
        cache_token_bytes=none,
        head_flops=2.0 * rows * length * head.numel(),
        head_bytes=meter.peak_bytes,
        widens=chain.wide_products,
    )
