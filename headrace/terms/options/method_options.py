"""Options of what is trained, and how."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from headrace.terms.options.declared import Declared, Group, option
from headrace.terms.options.optimizer import ALL, MATRICES, ParameterGroup, Schedule
from headrace.terms.options.option_kinds import Listed, Number, NumberOr, OneOf, RecordOf, Text, Whole
from headrace.terms.options.summing import SEQUENTIAL, TREE

_method = partial(option, plan=True, group=Group.METHOD)
_learning = partial(option, group=Group.LEARNING)

# Other names for the dtypes of options.
DTYPE_NAMES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
# The router's loss by the model's own coefficient.
OF_MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class MethodOptions(Declared):
    """What is trained, by which rule of updates, at which rates, and in which numbers."""

    optimizer: str = _method(
        "adamw",
        Text(),
        "Update rule and its settings: NAME or NAME:KEY=VALUE,KEY=VALUE.",
        row="the update rule and its settings: `NAME`, or `NAME:KEY=VALUE,KEY=VALUE` as in the table below. `adamw8bit` is "
        "`adamw:moments=int8`. Fixed for a run",
        often=True,
    )
    gradient: str = _method(
        "dense",
        Text(),
        "`dense` and `rows` train full weights, `rows` with less memory for tables; `lsp` trains subspaces.",
        row="`dense` trains full weights; so does `rows`, which updates those rows of embeddings that a step touches. "
        "`lsp` trains low-dimensional subspaces of the blocks' matrices (LSP-Offload). Settings are in the table below. "
        "Fixed for a run",
    )
    train: str = _method(
        ALL,
        OneOf((ALL, MATRICES)),
        "What to train: all parameters, or only the weight matrices of the blocks.",
        row="`all` parameters, or only the `matrices` of the blocks. Then embeddings, norms, biases and the head do not "
        "change, and do not count for clipping",
    )
    adapter: str | None = _method(
        None,
        Text(),
        "Train adapters beside frozen weights, such as lora:rank=16, or table:rows=4096,layers=8+20.",
        row="train a LoRA or DoRA adapter, or row tables, beside frozen weights, with settings as in the table below. "
        "`final/` then has PEFT's files, or the tables'. Fixed for a run",
        often=True,
    )
    loss: str | None = _method(
        None,
        Text(),
        "Loss of pairs or rewards instead of tokens, such as dpo:beta=0.1, orpo, simpo, kto or grpo.",
        row="train on preferences by a loss of pairs, with settings as in [preferences](preferences.md), or on "
        "[rewards](rewards.md). Fixed for a run",
        words="of each token",
    )
    router_aux_loss_coef: float | str | None = _method(
        None,
        NumberOr(Number(), OF_MODEL),
        "Coefficient of a mixture's router loss; 0 leaves it out, `model` is that of config.json.",
        row="coefficient of a mixture's router loss, as in TRL. 0 leaves it out; `model` adds it by the coefficient of "
        "`config.json` or of its class, as `dpo`, `kto` and `grpo` do by default ([mixtures](mixtures.md)). Fixed for a run",
        words="`model` for `dpo`, `kto`, `grpo`; else `output_router_logits` decides",
    )
    learning_rate: float = _learning(1e-5, Number(), "Learning rate after the warm-up.", often=True)
    weight_decay: float = _learning(
        0.0,
        Number(),
        "Weight decay; vectors, such as norms and biases, have none.",
        row="of the optimizer. No vector is decayed, such as norms and biases, nor are parameters that never have a gradient "
        "(indexers)",
    )
    parameter_groups: tuple[ParameterGroup, ...] = _learning(
        (),
        Listed(RecordOf(ParameterGroup)),
        "Parameters with a decay and a learning rate of their own.",
        row="list of `{pattern, weight_decay, learning_rate_scale}`, first match wins",
        cli=False,
    )
    warmup_steps: int = _learning(0, Whole(0), "Steps in which the learning rate rises linearly.")
    lr_schedule: str = _learning(
        "constant", OneOf(Schedule.KINDS), "How the learning rate falls after the warm-up: constant, linear or cosine."
    )
    max_grad_norm: float | None = _learning(
        1.0,
        Number(),
        "Clip gradients to this global norm; 0 for none.",
        row="exact clipping by the global norm; 0 for none. If clipping is rare, updates start before the norm is known. A "
        "wrong guess is undone, so the bits are the same",
        words="1.0",
        optional=True,
        plan=True,
    )
    compute_dtype: str = _method(
        "bfloat16",
        OneOf(("bfloat16", "float32", "float16"), DTYPE_NAMES),
        "Dtype of forward and backward: bfloat16, float32 or float16. Master weights stay float32.",
        row="or `float32`, `float16` (dynamic loss scaling); the master weights are always fp32",
    )
    gradient_dtype: str | None = _method(
        None,
        OneOf(("bfloat16", "float32", "float16"), DTYPE_NAMES),
        "Dtype in which gradients leave the device.",
        row="dtype of drained gradients; `float32` leaves them unrounded; micro-batches are summed in fp32 either way",
        words="`compute_dtype`; `float32` for adapters",
        cli=False,
    )
    gradient_sum: str = _method(
        SEQUENTIAL,
        OneOf((SEQUENTIAL, TREE)),
        "Order in which micro-batch gradients are added; `tree` gives the same bits for any number of workers.",
        row="order in which gradients of micro-batches are added. `tree` gives the same bits for any number of a node's "
        "workers under one `plan`. It takes more memory; with tied weights one fp32 gradient of the embedding for each "
        "micro-batch",
    )
