"""Options of what is trained, and by which mathematics."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.terms.declared import Declared, option
from headrace.terms.optimizer import ALL, MATRICES, ParameterGroup, Schedule
from headrace.terms.option_kinds import Listed, Number, OneOf, Record, Text, Whole
from headrace.terms.summing import SEQUENTIAL, TREE

# Other names for the dtypes of options.
DTYPE_NAMES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


@dataclass(frozen=True, kw_only=True)
class MethodOptions(Declared):
    """What is trained, by which rule of updates, at which rates, and in which numbers."""

    optimizer: str = option(
        "adamw",
        Text(),
        "The rule of updates, NAME or NAME:KEY=VALUE,KEY=VALUE.",
        row="the rule of updates and its settings: `NAME`, or `NAME:KEY=VALUE,KEY=VALUE` as in the table below; `adamw8bit` is "
        "`adamw:moments=int8`; fixed for a run",
        plan=True,
    )
    gradient: str = option(
        "dense",
        Text(),
        "How gradients travel, dense or lsp:KEY=VALUE,KEY=VALUE.",
        row="how gradients travel, and so what is trained: `dense`, all of it; or `lsp`, subspaces of the matrices of blocks "
        "(LSP-Offload), with settings as in the table below; fixed for a run",
        plan=True,
    )
    train: str = option(
        ALL,
        OneOf((ALL, MATRICES)),
        "all, or matrices: those of blocks alone.",
        row="`all` parameters, or the `matrices` of blocks: then embeddings, norms, biases and the head stay as they are, and "
        "do not count for clipping",
        plan=True,
    )
    adapter: str | None = option(
        None,
        Text(),
        "Train adapters beside frozen weights, lora:rank=16 or dora:rank=16.",
        row="train small matrices beside frozen ones, with settings as in the table below; `final/` then has "
        "peft's files; fixed for a run",
        words="none",
        plan=True,
    )
    learning_rate: float = option(1e-5, Number(), "Of the optimizer, after the warm-up.")
    weight_decay: float = option(
        0.0,
        Number(),
        "Not applied to norms and biases.",
        row="of the optimizer; norms and biases are not decayed, nor what has no gradient whatever the input (indexers)",
    )
    parameter_groups: tuple[ParameterGroup, ...] = option(
        (),
        Listed(Record(ParameterGroup)),
        "Parameters with a decay and a learning rate of their own.",
        row="list of `{pattern, weight_decay, learning_rate_scale}`, first match wins",
        cli=False,
    )
    warmup_steps: int = option(0, Whole(0), "Steps of linear rise of the learning rate.")
    lr_schedule: str = option(
        "constant", OneOf(Schedule.KINDS), "constant, linear or cosine.", row="`constant`, `linear` or `cosine`"
    )
    max_grad_norm: float | None = option(
        1.0,
        Number(),
        "Clip to this global norm; 0 for none.",
        row="exact global-norm clipping; 0 for none. Where clipping is rare, updates start before the norm is known, and a "
        "wrong guess is taken back: same bits",
        words="1.0",
        optional=True,
        plan=True,
    )
    compute_dtype: str = option(
        "bfloat16",
        OneOf(("bfloat16", "float32", "float16"), DTYPE_NAMES),
        "bfloat16, float32 or float16.",
        row="or `float32`, `float16` (dynamic loss scaling); the master weights are always fp32",
        plan=True,
    )
    gradient_dtype: str | None = option(
        None,
        OneOf(("bfloat16", "float32", "float16"), DTYPE_NAMES),
        "Dtype of drained gradients.",
        row="dtype of drained gradients; `float32` leaves them unrounded; micro-batches are summed in fp32 either way",
        words="`compute_dtype`; `float32` for adapters",
        cli=False,
    )
    gradient_sum: str = option(
        SEQUENTIAL,
        OneOf((SEQUENTIAL, TREE)),
        "sequential or tree.",
        row="how gradients of micro-batches are added: `tree` gives the same bits with any number of a node's workers under "
        "one `plan`; it takes more memory, and for tied weights one fp32 gradient of the embedding for each micro-batch",
    )
