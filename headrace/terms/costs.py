"""What a model costs to run, as numbers: the planner's input. `model.costs.cost_profile` makes it from shapes alone."""

from dataclasses import dataclass, replace

from headrace.terms.embedding_rows import BlockRows

# Up to so many rows, torch's own products of bfloat16 are at least as fast as products by way of float32 (docs/log/decoding).
FEW_ROWS = 3
# Operators that the eager loop over experts calls for each (counted in transformers 5.23, Mixtral and Qwen3).
CALLS_OF_EXPERT = 23
# Where each tensor begins that goes down for the host to attend.
CARRIED_ALIGNMENT = 64
# The name of fused attention among a block's operators, whichever kernel does it.
ATTENTION = "attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCosts:
    """One replayable operator call of a block on one micro-batch; its index in `BlockCosts.operators` is its ordinal."""

    name: str
    flops: float
    output_bytes: int
    # Recompute runs it too: it draws random numbers, or its output is overwritten, or recompute runs other operators.
    must_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """One block on one micro-batch."""

    num_elements: int
    num_parameters: int
    forward_flops: float
    forward_workspace_bytes: int  # peak of live tensors beyond weights and the input, without autograd
    backward_workspace_bytes: int  # the same for recompute and backward, including the gradients of parameters
    operators: tuple[OperatorCosts, ...] = ()
    skippable: tuple[int, ...] = ()  # ordinals whose output no gradient depends on
    attention_flops: float = 0.0  # the part of `forward_flops` that attention's two products take
    # Where experts are parts: what a micro-batch takes while others are at them, in forward and in backward.
    waiting_bytes: tuple[int, int] = (0, 0)
    waiting_alone_bytes: int = 0  # and in backward without its graph
    choices: int = 0  # and to how many experts a token is sent
    asked_rows: tuple[int, ...] = ()  # of each table that is read by rows: how many are asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """A model on micro-batches of `sequences` x `length` tokens. `*_workspace_bytes` are peaks of live tensors."""

    name: str
    compute_dtype: str
    sequences: int
    length: int
    hidden_size_bytes: int  # of one token's hidden state, where it is widest: after the first block some models have float32
    prologue_parameters: int
    epilogue_parameters: int
    tied: bool
    blocks: tuple[BlockCosts, ...]
    prologue_workspace_bytes: int
    prologue_backward_workspace_bytes: int
    # Pairs (tokens of a chunk, peak bytes), tokens rising; the peak is convex in between.
    epilogue_workspace_bytes: tuple[tuple[int, int], ...]
    epilogue_flops_per_token: float
    call_bytes: int  # masks and rotary tables of one micro-batch, kept through the step
    wide_products: bool = False  # products of 16-bit numbers are computed in float32
    by_samples: bool = False  # rows are run sample by sample: a micro-batch has several gradients to be summed
    head_rows: int = 0  # rows of the head that the loss takes at a time; 0: all
    kept_logit_tokens: int = 0  # so many tokens at a time, no logits of ranges are computed again; 0: there are no ranges
    by_exact_lengths: bool = False  # of these, only samples of exactly one length run together

    @property
    def num_parameters(self) -> int:
        """Exact number of parameters."""
        return self.prologue_parameters + self.epilogue_parameters + sum(block.num_parameters for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """One pass of a seat through the model. `flops`, and `calls` of operators, are by block; `workspace_bytes` is the peak of
    live tensors of a block. `query_bytes` are by block those of attention's queries, `result_bytes` those of its results. They
    are 0 if attention does not go through transformers' interface. `tables` are those in blocks that are read by rows, with the
    rows that a pass asks for. Reading `waited_bytes` of memory, by block, takes as long as waiting for these.
    """

    flops: tuple[float, ...]
    workspace_bytes: int
    call_bytes: int  # masks, positions and rotary tables, kept through the pass
    hidden_bytes: int  # of the hidden states between two blocks
    calls: tuple[int, ...] = ()
    query_bytes: tuple[int, ...] = ()
    result_bytes: tuple[int, ...] = ()
    tables: tuple[BlockRows, ...] = ()
    waited_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeCosts:
    """A pass over a prompt once more, from the blocks' inputs to their keys and values, by block. `input_bytes` are those of a
    whole prompt. A seat keeps `call_bytes` with which its blocks are called again.
    """

    flops: tuple[float, ...]
    calls: tuple[int, ...]
    input_bytes: int
    call_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedCaches:
    """Keys and values in the code `name`. `decoded_bytes` are by block what a token of all rows takes as attention reads it;
    0 where a block's cache is not coded.
    """

    name: str
    decoded_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCosts:
    """A seat of `rows` rows: its first pass, over `prompt_length` tokens, and the one after, over one.

    With a `prefill_chunk` prompts are taken in chunks of so many tokens. A pass takes one of them, and `first` is the last of
    these passes. Or a pass takes all `chunks` of a prompt, one after the other in each block. `cache_bytes` are the bytes of
    each block's cache after the prompt; `cache_token_bytes` are what one more token of all rows adds to each. `tiered` says for
    each block whether its cache may live elsewhere while the block does not run. It may if the cache keeps tokens and nothing
    else. `recomputing` is there if prompts may be kept as blocks' inputs, and these have fewer bytes than keys and values. With
    `coded` the bytes of caches are those of their codes. `head_flops` are for one position of all rows; `head_bytes` are what
    head and sampling allocate for a moment.
    """

    rows: int
    prompt_length: int
    first: PassCosts
    next: PassCosts
    cache_bytes: tuple[int, ...]
    cache_token_bytes: tuple[int, ...]
    head_flops: float
    head_bytes: int
    choices: int = 0  # experts that a token is sent to
    tiered: tuple[bool, ...] = ()
    widens: bool = False  # products of 16-bit numbers are computed in float32, except where they have few rows
    prefill_chunk: int = 0
    chunks: int = 1
    recomputing: RecomputeCosts | None = None
    coded: CodedCaches | None = None

    def is_coded(self, block: int) -> bool:
        """Return whether the cache of block `block` (from 1) is coded."""
        return self.coded is not None and self.coded.decoded_bytes[block - 1] > 0

    @property
    def first_tokens(self) -> int:
        """Tokens of a row that one pass over its prompt takes."""
        return min(self.prompt_length, (self.prefill_chunk or self.prompt_length) * self.chunks)

    @property
    def product_tokens(self) -> int:
        """Tokens of a row that one product takes there."""
        return self.prefill_chunk or self.prompt_length

    @property
    def first_passes(self) -> int:
        """Passes that a whole prompt takes."""
        return -(-self.prompt_length // self.first_tokens)

    @property
    def attends(self) -> bool:
        """Whether the host could attend for each block whose cache may lie elsewhere."""
        asked = self.next.query_bytes
        return any(self.tiered) and bool(asked) and all(size for size, may in zip(asked, self.tiered, strict=True) if may)


def in_one_pass(last: GenerationCosts, early: PassCosts) -> GenerationCosts:
    """Return `last`, the costs of prompts in chunks, with all chunks of a prompt in one pass; `early` is the first one's.

    What a chunk takes grows evenly with the tokens before it. Memory counts each as the last one.
    """
    count, most = last.first_passes, last.first
    first = replace(
        most,
        flops=tuple(count * (one + other) / 2 for one, other in zip(early.flops, most.flops, strict=True)),
        calls=tuple(count * called for called in most.calls),
        call_bytes=count * most.call_bytes,
        hidden_bytes=count * most.hidden_bytes,
    )
    return replace(last, first=first, chunks=count, recomputing=None)


def touched(experts: int, choices: int, tokens: int) -> float:
    """Return how many of `experts` are expected to be wanted where each of `tokens` tokens chooses `choices` of them."""
    if experts <= choices:
        return float(experts)
    return experts * (1 - (1 - choices / experts) ** tokens)
