"""The choices of a training plan, in groups: its batch, what waits for backward, its gradients, its updates."""

from dataclasses import dataclass

from headrace.terms.options.summing import SEQUENTIAL


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The tokens of a step, and how they are cut: `hidden_size_bytes` are those of one token's hidden state.

    The loss takes `head_rows` rows of the head at a time; 0: all. A loss of the whole step makes two `head_passes`. With
    `pages` the weights of a block cross the link in as many pages as there are micro-batches, one while each is computed.
    """

    sequence_length: int
    tokens_per_step: int
    micro_batch_sequences: int
    num_micro_batches: int
    hidden_size_bytes: int
    loss_chunk_tokens: int
    head_rows: int = 0
    head_passes: int = 1
    pages: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stash:
    """What waits for backward, by block: its input, and the outputs of operators that are kept and replayed.

    `kept` and `skipped` are ordinals of `operators`; recompute leaves out the latter, because nothing needs them. `kept_bytes`
    are those of the kept outputs, for one micro-batch. `tiers` say where a block's tensors wait.
    """

    tiers: tuple[str, ...]
    slots: int
    kept: tuple[tuple[int, ...], ...]
    kept_bytes: tuple[int, ...]
    skipped: tuple[tuple[int, ...], ...]
    operators: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosted:
    """Hidden states that wait in host memory between two units, and their gradients. The device has slots for those that come,
    and for those that go, with what their block keeps. In a coarse plan a block stands for so many `blocks`.
    """

    coming: int
    going: int
    blocks: float = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """How gradients are summed and drained. Those that are held wait in tier `held`.

    `accumulators` are the buffers that sum a block's gradient: with two, the next is summed while one is drained. `order` says
    how the gradients of micro-batches are added (`terms/options/summing.py`).
    """

    dtype: str
    held: str
    slots: int
    accumulate: bool
    accumulators: int = 1
    order: str = SEQUENTIAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """When units are updated, where, and in which pieces.

    `policy` says when a unit may be updated:
      *immediate*    when its gradient has been drained, behind backward: without clipping;
      *deferred*     when the global norm is known, behind the next forward: exact clipping, every gradient is held until then;
      *speculative*  as immediate, as if nothing were clipped, but every gradient is held. If the norm says otherwise, the step
                     returns to the committed slots and its updates are done again. That is as exact, and faster while guesses
                     are right;
      *rerun*        as immediate, as if nothing were clipped, and no gradient is held. Where the norm says otherwise, the step
                     is taken back and run again from its batch with the factor that is known then: as exact, in twice the time.
    Under *immediate* and *speculative*, `late_units` are still updated behind the next forward. So drives and update cores have
    the same work in both halves of the step. Under *deferred* all units are late. Chunks have at most `chunk_elements`. With a
    separate device each `device_every`-th of them, counted through all units, is updated on it (1: all, 0: none). States of
    `resident_states` units stay in host memory; those of others pass through `state_slots` buffers.
    """

    policy: str
    late_units: tuple[int, ...]
    checkpoint_every: int
    chunk_elements: int
    state_slots: int
    resident_states: tuple[int, ...]
    threads: int
    device_every: int = 0
