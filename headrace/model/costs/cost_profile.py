"""What a model costs, from shapes alone: no weight is read, nothing is computed.

The model's own code runs on fake tensors (shapes, dtypes and storages without memory). A dispatch mode adds up floating-point
operations and follows which storages are alive. So the peak of live bytes of each operation of a step is known before anything
is allocated. What a library allocates inside one operator is not seen.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from headrace.model.blocks.replay import count_operators, find_skippable, operator_name
from headrace.model.chain.chain import Chain
from headrace.model.costs.cost_meter import AttentionOfGpus
from headrace.model.costs.shape_costs import costs_on_shapes
from headrace.model.parts.runner import Runner, left_as_found
from headrace.model.trials.instance import tiny_samples
from headrace.model.trials.trial import tried
from headrace.terms.collector import without_collection
from headrace.terms.costs import ATTENTION, BlockCosts, ModelCosts, OperatorCosts
from headrace.terms.errors import HeadraceError, ModelError, in_one_line


@without_collection()
def profile(
    chain: Chain,
    sequences: int,
    length: int,
    *,
    for_gpu: bool = False,
    huge_pages: bool | None = None,
    other: ModelCosts | None = None,
) -> ModelCosts:
    """Return the costs of `chain` on micro-batches of `sequences` rows of `length` tokens.

    `for_gpu`: on a GPU, which need not be here. `huge_pages`: as in `CostMeter`. `other`: what this function returned for
    micro-batches of another size; its epilogue is reused, because that works on chunks of positions, however many there are.

    Blocks with equal layouts and calls are run once, by the model's own code. If the chain runs blocks by other code
    (`Chain.replayable` is false), no operator can be named, so none is listed. All gradients of a block's parameters may exist
    at once, so all are counted.

    Raises:
        ModelError: the model's code asks for values, which fake tensors do not have.
    """
    attention = AttentionOfGpus()
    try:
        with (
            _quiet(logging.getLogger(torch._subclasses.fake_tensor.__name__)),
            left_as_found(chain.model.modules()),
            FakeTensorMode(allow_non_fake_inputs=True),
            chain.own_code(),
            attention if for_gpu else nullcontext(),
        ):
            on_gpu = for_gpu or chain.device.type == "cuda"
            costs = costs_on_shapes(chain, sequences, length, other, on_gpu=on_gpu, huge_pages=huge_pages)
    except HeadraceError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"{type(chain.model).__name__}: its code depends on values, not on shapes alone ({error.func}), so a step cannot "
            "be planned. One cause are routers that copy counts to the host; a newer transformers may not do so (here it is "
            f"{transformers.__version__})"
        ) from error
    except Exception as error:  # the architecture's own code on tensors without values, and whatever operators it has
        operator = next(iter(getattr(error, "__notes__", ())), "no operator of torch")
        raise ModelError(
            f"{type(chain.model).__name__}: a step cannot be planned: its code fails on shapes alone, in {operator}: "
            f"{in_one_line(error)}"
        ) from error
    if costs.by_samples:
        costs = _by_samples(costs)
    if not chain.replayable:
        return replace(costs, blocks=tuple(_not_replayable(block, chain.dtype.itemsize) for block in costs.blocks))
    if costs.by_samples:
        return costs
    # Outside of the fake tensors, because this really computes, on a tiny instance.
    kinds = {id(block): _random_attention(block) if attention.dropped else block for block in costs.blocks}
    found = {key: replace(block, skippable=_skippable(chain, block)) for key, block in kinds.items()}
    return replace(costs, blocks=tuple(found[id(block)] for block in costs.blocks))


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Keep tracebacks out of the log: the caller reports the error in one line."""
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class Profiles:
    """What `profile` returns for one chain, by the size of a micro-batch. Each is made once, with the help of another: the
    first with `other`, of a chain with the same epilogue.
    """

    def __init__(
        self, chain: Chain, *, for_gpu: bool = False, huge_pages: bool | None = None, other: ModelCosts | None = None
    ) -> None:
        self._chain, self._for_gpu, self._huge_pages, self._other = chain, for_gpu, huge_pages, other
        self._costs: dict[tuple[int, int], ModelCosts] = {}

    @property
    def any(self) -> ModelCosts | None:
        """Costs of some micro-batch, if there are any yet."""
        return next(iter(self._costs.values()), self._other)

    def of(self, sequences: int, length: int) -> ModelCosts:
        """Return the costs on micro-batches of `sequences` rows of `length` tokens."""
        key = (sequences, length)
        if key not in self._costs:
            self._costs[key] = profile(
                self._chain, sequences, length, for_gpu=self._for_gpu, huge_pages=self._huge_pages, other=self.any
            )
        return self._costs[key]


def _skippable(chain: Chain, block: BlockCosts) -> tuple[int, ...]:
    if chain.adapters is not None:  # the tiny instance, on which skippable operators are found, has no adapters
        return ()
    found = skippable(chain.config, block.operators)
    return tuple(ordinal for ordinal in found if not block.operators[ordinal].must_run)


def _random_attention(block: BlockCosts) -> BlockCosts:
    operators = (replace(operator, must_run=operator.must_run or operator.name == ATTENTION) for operator in block.operators)
    return replace(block, operators=tuple(operators))


def _by_samples(costs: ModelCosts) -> ModelCosts:
    """Return the costs if rows run sample by sample. A group of samples takes no more than a micro-batch, but the other groups'
    inputs and outputs wait beside it. In backward the gradients of their outputs wait, too.
    """
    waiting_bytes = costs.sequences * costs.length * costs.hidden_size_bytes
    return replace(
        costs,
        prologue_workspace_bytes=costs.prologue_workspace_bytes + waiting_bytes,
        prologue_backward_workspace_bytes=costs.prologue_backward_workspace_bytes + waiting_bytes,
        blocks=tuple(
            replace(
                block,
                operators=(),
                forward_workspace_bytes=block.forward_workspace_bytes + 2 * waiting_bytes,
                backward_workspace_bytes=block.backward_workspace_bytes + 3 * waiting_bytes,
            )
            for block in costs.blocks
        ),
    )


def _not_replayable(block: BlockCosts, bytes_per_element: int) -> BlockCosts:
    gradients_bytes = block.num_elements * bytes_per_element
    return replace(block, operators=(), backward_workspace_bytes=block.backward_workspace_bytes + gradients_bytes)


def skippable(config: Any, operators: Sequence[OperatorCosts]) -> tuple[int, ...]:
    """Return the ordinals that recompute of a block running `operators` may skip, for the architecture of `config`: no gradient
    depends on their output.

    They are found on its tiny instance, by the sequence of operators that a block runs. A block with another sequence is
    recomputed whole.
    """
    return _skippable_orders(config).get(tuple(operator.name for operator in operators), ())


@tried
def _skippable_orders(runner: Runner) -> dict[tuple[str, ...], tuple[int, ...]]:
    sample = tiny_samples(runner.model)[0]
    found: dict[tuple[str, ...], tuple[int, ...]] = {}
    with torch.no_grad():
        start = runner.prologue(sample)
    hidden = start.hidden.detach()
    for index, call in enumerate(start.calls):
        leaf = hidden.detach().requires_grad_()
        parameters = [parameter for parameter in runner.blocks[index].parameters() if parameter.requires_grad]

        def forward(index: int = index, leaf: torch.Tensor = leaf, call: Any = call) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # dropout must draw the same numbers each time
                result = runner.block(index, leaf, call)
            # All outputs in one, so that what is handed aside has a gradient too.
            return torch.cat([result.hidden.flatten(), *(aside.flatten().to(result.hidden.dtype) for aside in result.asides)])

        def backward(out: torch.Tensor, wanted: list[torch.Tensor] = [leaf, *parameters]) -> list[torch.Tensor]:  # noqa: B006
            weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype)
            gradients = torch.autograd.grad(out, wanted, weights, allow_unused=True, materialize_grads=True)
            return list(gradients)

        names = tuple(operator_name(operator) for operator in count_operators(forward))
        ordinals = tuple(sorted(find_skippable(forward, backward)))
        # Blocks with equal sequences may differ in what they need: only what all of them can do without is skipped.
        found[names] = tuple(sorted(set(found.get(names, ordinals)) & set(ordinals)))
        with torch.no_grad():
            hidden = runner.block(index, hidden, call).hidden
    return found
