"""DeepSpeed's JSON: its options alone, for it names neither a model nor data."""

from collections.abc import Mapping
from typing import Any

from headrace.migrate.source import MigratedFile, one_reason
from headrace.migrate.training_arguments import PLANNED, take_optimizer, take_schedule

NAME = "deepspeed"

_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "gradient_clipping")
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_REASONS = {
    **one_reason(
        PLANNED,
        "activation_checkpointing* amp.* bf16.* communication_data_type compile.* prescale_gradients sequence_parallel_size "
        "tensor_parallel* zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization.*",
    ),
    "autotuning*": "`headrace plan` searches placements without a run",
    "compression_training*": "compress the model after training: `headrace compress`",
    "data_efficiency*": "data are taken as they are",
    "torch_autocast*": "see the option compute_dtype",
    "aio.*": "drives are measured by `headrace bench machine`",
    "comms_logger*": "metrics.jsonl and the report have each step's bytes",
    "fp16.*": "the scale of losses is dynamic",
    "gradient_accumulation_dtype": "micro-batches are summed in float32",
    "gradient_accumulation_steps": "tokens_per_step counts a whole step",
    "steps_per_print": "each step is a line of metrics.jsonl",
    "train_batch_size": "tokens_per_step is this many rows times their length: set it, and sequence_length",
    "train_micro_batch_size_per_gpu": "micro-batches are planned",
    "wall_clock_breakdown": "`headrace report RUN_DIR` shows where the time goes",
}


def recognises(values: Mapping[str, Any]) -> bool:
    """Return whether these are the keys of a DeepSpeed configuration."""
    return any(key in values for key in _KEYS) and not any(key in values for key in ("base_model", "model_name_or_path"))


def translate(source: MigratedFile) -> None:
    """Translate the options. Nested keys are joined with dots."""
    source.values = flat(source.values)
    if str(source.values.get("optimizer.type", "")):
        _take_optimizer(source)
    if name := source.take("scheduler.type"):
        take_schedule(source, _SCHEDULES.get(str(name), name), "scheduler.type")
        source.rename("scheduler.params.warmup_num_steps", "warmup_steps", int)
        source.rename("scheduler.params.warmup_max_lr", "learning_rate", float)
        source.rename("scheduler.params.total_num_steps", "max_steps", int)
        source.take("scheduler.params.warmup_min_lr")
    source.rename("gradient_clipping", "max_grad_norm", float)
    if source.take("bf16.enabled"):
        source.set("compute_dtype", "bfloat16", "bf16.enabled")
    elif source.take("fp16.enabled"):
        source.set("compute_dtype", "float16", "fp16.enabled")
    places = [f"zero_optimization.offload_{what}.nvme_path" for what in ("optimizer", "param")]
    found = list(dict.fromkeys(str(path) for key in places if (path := source.take(key))))
    if found:
        source.set("ssd", found, ", ".join(key for key in places if source.has(key)))
    source.finish(_REASONS)


def _take_optimizer(source: MigratedFile) -> None:
    name = str(source.take("optimizer.type")).lower()
    betas = source.take("optimizer.params.betas", [0.9, 0.999])
    values = {"adam_beta1": betas[0], "adam_beta2": betas[1], "adam_epsilon": source.take("optimizer.params.eps", 1e-8)}
    inner = MigratedFile(values)
    take_optimizer(inner, "adamw" if name in ("adam", "adamw", "fusedadam", "deepspeedcpuadam") else name, "optimizer.type")
    source.set("optimizer", inner.options["optimizer"], "optimizer.type, optimizer.params")
    source.notes += inner.notes
    source.rename("optimizer.params.lr", "learning_rate", float)
    source.rename("optimizer.params.weight_decay", "weight_decay", float)
    for key in source.values:
        if key in ("optimizer.params.torch_adam", "optimizer.params.adam_w_mode"):
            source.leave(key, "AdamW decays weights apart from gradients")


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with keys joined by dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found
