"""What the formats have in common: transformers' TrainingArguments, and the words for optimizers, schedules and adapters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.migrate.source import MigratedFile, one_reason, refuse

_ADAMW = (
    *("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw", "adam"),
    *("paged_adamw_32bit", "paged_adamw"),
)
_ADAMW_8BIT = ("adamw_bnb_8bit", "adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit", "ademamix_8bit")
_SAME = ("adafactor", "lomo", "adalomo", "muon")
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}

_FORMATS = ("json", "csv", "parquet", "text", "arrow")  # of `datasets`, in the place of a name

# Keys that say how a result is computed and not which: Headrace plans that itself.
PLANNED = "Headrace plans memory, kernels and drives itself; the result does not depend on it"
LOGGED = "each step is a line of metrics.jsonl"
_NO_LOGITS = "an evaluation gives a loss, no logits"
_ONE_PROCESS = "one process trains; several machines: docs/node.md"
_GOES_ON = "`headrace resume RUN_DIR` goes on after the newest step"
REASONS = {
    **one_reason(
        PLANNED,
        "accelerator_config activation_checkpointing* attn_implementation auto_find_batch_size bf16_full_eval dataloader_* "
        "dataset_num_proc deepspeed eval_accumulation_steps fp16_full_eval fsdp* gradient_checkpointing* low_cpu_mem_usage "
        "parallelism_config per_device_eval_batch_size tf32 torch_empty_cache_steps use_cpu",
    ),
    **one_reason(
        _NO_LOGITS, "batch_eval_metrics eval_do_concat_batches eval_use_gather_object include_for_metrics prediction_loss_only"
    ),
    **one_reason(_ONE_PROCESS, "ddp_* local_rank save_on_each_node"),
    **one_reason(
        LOGGED, "disable_tqdm include_num_input_tokens_seen log_level* log_on_each_node logging_* skip_memory_metrics"
    ),
    **one_reason("the best model is the one with the lowest evaluation loss", "greater_is_better metric_for_best_model"),
    **one_reason("`headrace export RUN_DIR OUT --push-to-hub OWNER/NAME` sends a run's model", "hub_* push_to_hub"),
    **one_reason(_GOES_ON, "ignore_data_skip restore_callback_states_from_checkpoint"),
    **one_reason("see the option liger", "liger_kernel_config use_liger_kernel"),
    **one_reason("see the option report_to", "project trackio_*"),
    "data_seed": "seed draws the order of samples",
    "debug": "modules hold no weights that it could look into",
    "do_eval": "held-out data decide that",
    "do_predict": "`headrace generate` answers",
    "do_train": "`headrace train` trains",
    "enable_jit_checkpoint": "each step is committed",
    "eval_delay": "held-out data are evaluated from the first eval_steps on",
    "eval_on_start": "`headrace eval` measures the model before a run",
    "full_determinism": "the same plan, data and seed give the same bits",
    "label_names": "data say what is trained",
    "length_column_name": "lengths are counted",
    "overwrite_output_dir": "a run directory that is not empty is refused",
    "remove_unused_columns": "unused columns are ignored, and named",
    "resume_from_checkpoint": "`headrace resume RUN_DIR` resumes a run",
    "save_only_model": "kept models are model directories; the state stays on the SSDs",
    "save_safetensors": "models are safetensors",
    "train_sampling_strategy": "samples are drawn in an order of their own in each epoch, by seed; see the option shuffle",
    "torch_compile*": "see the option compile_blocks",
    "trust_remote_code": "code of a model directory is never run",
    "use_cache": "training has no cache",
    "warmup_ratio": "count it: `headrace plan` says how many steps the run has; set warmup_steps",
}


def take_training_arguments(
    source: MigratedFile, *, batch: int, rate: float, epochs: float, length: int, pairs: bool = False
) -> None:
    """Take transformers' TrainingArguments. The defaults of the trainer are written out where they differ from Headrace's."""
    take_rows(source, "per_device_train_batch_size", batch, length, pairs=pairs)
    source.set("learning_rate", float(source.take("learning_rate", rate)), "learning_rate")
    if int(source.take("max_steps", -1)) > 0:
        source.rename("max_steps", "max_steps", int)
    source.set("epochs", float(source.take("num_train_epochs", epochs)), "num_train_epochs")
    take_optimizer(source, source.take("optim", "adamw_torch_fused"), "optim")
    take_schedule(source, source.take("lr_scheduler_type", "linear"), "lr_scheduler_type")
    take_common(source)
    take_saving(source)


def take_common(source: MigratedFile) -> None:
    """Take the keys that all formats but DeepSpeed's write alike."""
    take_warmup(source)
    for key in ("weight_decay", "max_grad_norm"):
        source.rename(key, key, float)
    if source.options.get("weight_decay"):
        source.notes.append("weight_decay: no vector is decayed; transformers spares norms and biases alone")
    source.set("seed", int(source.take("seed", 42)), "seed")
    take_precision(source)
    source.rename("early_stopping_patience", "early_stopping_patience", int)
    source.rename("load_best_model_at_end", "load_best_model_at_end", bool)
    source.rename("run_name", "run_name")
    loggers = source.take("report_to", [])
    names = [loggers] if isinstance(loggers, str) else list(loggers)
    if names := [name for name in names if name not in ("none", "all")]:
        known = [name for name in names if _takes(name)]
        if known:
            source.set("report_to", known, "report_to")
        if len(known) < len(names):
            source.leave("report_to", f"there is no logger {', '.join(sorted(set(names) - set(known)))} yet")


def _takes(logger: str) -> bool:
    trial = MigratedFile({})
    trial.set("report_to", [logger], "report_to")
    return bool(trial.options)


def take_rows(source: MigratedFile, batch_key: str, batch: int, length: int, *, pairs: bool = False) -> None:
    """Take rows of a batch, or `pairs` of rows, and how many batches are accumulated, as tokens of a step."""
    rows = int(source.take(batch_key, batch)) * int(source.take("gradient_accumulation_steps", 1)) * (source.processes or 1)
    source.set("tokens_per_step", rows * length * (2 if pairs else 1), f"{batch_key}, gradient_accumulation_steps")
    many = f"{rows} pairs of" if pairs else f"{rows}"
    whose = f"{source.processes} processes" if source.processes else "one GPU; multiply it by the number of GPUs"
    source.notes.append(f"tokens_per_step: {many} rows of {length} tokens are the step of {whose}")


def take_warmup(source: MigratedFile) -> None:
    """Take steps of warming up; a share of the run's steps, where the file says how many it has."""
    steps, ratio = float(source.take("warmup_steps", 0)), source.values.get("warmup_ratio")
    total = source.options.get("max_steps")
    if 0 < steps < 1:
        steps, ratio = 0.0, steps
    if steps:
        source.set("warmup_steps", int(steps), "warmup_steps")
    elif ratio and total:
        source.take("warmup_ratio")
        source.set("warmup_steps", math.ceil(float(ratio) * total), "warmup_ratio, max_steps")
    elif ratio and 0 < float(source.take("warmup_steps", 0)) < 1:
        source.leave("warmup_steps", REASONS["warmup_ratio"])


def take_precision(source: MigratedFile) -> None:
    """Take the dtype of compute."""
    automatic = source.values.get("bf16") == "auto"  # where it is possible, which it is here
    bfloat16 = source.take("bf16", source.take("bfloat16")) or automatic
    float16 = source.take("fp16", source.take("float16"))
    if bfloat16:
        source.set("compute_dtype", "bfloat16", "bf16")
    elif float16:
        source.set("compute_dtype", "float16", "fp16")
    source.take("pure_bf16")
    if source.has("torch_dtype") or source.has("dtype"):
        source.leave(
            "torch_dtype" if source.has("torch_dtype") else "dtype", "master weights are float32, compute is compute_dtype"
        )


def take_saving(source: MigratedFile) -> None:
    """Take how often models are kept and data are held out."""
    strategy = source.take("save_strategy", "steps")
    if strategy == "steps" and source.has("save_steps"):
        steps = source.take("save_steps")
        if float(steps) < 1:
            source.leave("save_steps", "a share of the steps; count it: `headrace plan` says how many steps the run has")
        else:
            source.set("save_steps", int(steps), "save_steps")
    source.take("save_steps")
    if source.has("save_total_limit") and strategy != "no":
        source.rename("save_total_limit", "save_total_limit", int)
    elif strategy == "epoch":
        source.leave("save_strategy", "with save_total_limit a run keeps a model at the end of each epoch; give a limit")
    source.take("save_total_limit")
    how = source.take("eval_strategy", source.take("evaluation_strategy"))
    if how in (None, "steps"):
        source.rename("eval_steps", "eval_steps", int)
    source.take("eval_steps")


def take_schedule(source: MigratedFile, name: Any, key: str) -> None:
    """Take the schedule of the learning rate."""
    if name in _SCHEDULES:
        source.set("lr_schedule", _SCHEDULES[name], key)
    else:
        source.set("lr_schedule", "cosine", key)
        source.notes.append(f"{key}: {name} is not known here; cosine is the nearest")


def take_optimizer(source: MigratedFile, name: Any, key: str) -> None:
    """Take the rule of updates with its settings. Headrace's AdamW has another beta2 by default, so it is written out."""
    name = str(name)
    beta1, beta2 = source.take("adam_beta1", 0.9), source.take("adam_beta2", 0.999)
    eps = source.take("adam_epsilon", source.take("adam_eps", 1e-8))
    settings = {"beta1": float(beta1), "beta2": float(beta2), "eps": float(eps)}
    if name in _ADAMW:
        source.set("optimizer", _with("adamw", settings), key)
    elif name in _ADAMW_8BIT:
        source.set("optimizer", _with("adamw", settings | {"moments": "int8"}), key)
        source.notes.append(f"{key}: {name} becomes AdamW with moments in int8, whose rounding is Headrace's own")
    elif "lion" in name:
        source.set("optimizer", "lion", key)
    elif name == "sgd":
        source.set("optimizer", "sgd:momentum=0", key)
    elif name in _SAME:
        source.set("optimizer", name, key)
        source.notes.append(f"{key}: look at the learning rate that {name} wants here (docs/rules.md)")
    else:
        source.set("optimizer", _with("adamw", settings), key)
        source.notes.append(f"{key}: {name} is not known here; AdamW stands in its place")


def _with(name: str, settings: dict[str, Any]) -> str:
    given = {"beta1": 0.9, "eps": 1e-8}
    words = [f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in settings.items()]
    told = [word for word, (key, value) in zip(words, settings.items(), strict=True) if given.get(key) != value]
    return f"{name}:{','.join(told)}" if told else name


def take_adapter(
    source: MigratedFile, kind: str, keys: tuple[str, str, str], targets: Any, defaults: tuple[int, float, float]
) -> None:
    """Take a LoRA or DoRA adapter. `keys` name rank, alpha and dropout, `defaults` are theirs; `targets` the modules."""
    rank = int(source.take(keys[0], defaults[0]))
    alpha, dropout = (float(source.take(key, default)) for key, default in zip(keys[1:], defaults[1:], strict=True))
    if source.take("peft_use_rslora", source.take("use_rslora")):  # scales by alpha / sqrt(rank)
        alpha *= math.sqrt(rank)
    settings = {"rank": rank, "alpha": f"{alpha:g}", "dropout": f"{dropout:g}" if dropout else None, "target_modules": targets}
    words = ",".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    dora = source.take("peft_use_dora", source.take("use_dora"))
    source.set("adapter", f"{'dora' if dora else kind}:{words}", ", ".join(keys))


def module_names_of(modules: Any) -> str | None:
    """Return module names as one word, None for a pattern or for none."""
    if isinstance(modules, str):
        modules = [word.strip() for word in modules.split(",")]
    if not isinstance(modules, Sequence) or not modules or any(set(name) & set("[]()\\|*+^$") for name in map(str, modules)):
        return None
    return "all-linear" if list(modules) in (["all"], ["all-linear"]) else "+".join(map(str, modules))


def refuse_methods(source: MigratedFile, keys: str) -> None:
    """Refuse methods that would train something else.

    Raises:
        ConfigError: one of the `keys`, which have blanks between them, is on.
    """
    for key in keys.split():
        if source.take(key):
            raise refuse(key, source.values[key], "is not trained by this version")


def note_initial_adapter_and_quantized_base(source: MigratedFile, adapter_key: str, coded_keys: Sequence[str]) -> None:
    """Say what becomes of the adapter that a training begins with, and of a quantized base."""
    if source.has(adapter_key):
        source.leave(adapter_key, "an adapter begins at zero; merge the other one first (`headrace export --merge`)")
    for key in coded_keys:
        if source.take(key):
            note_coded_base(source, key)


def set_data(source: MigratedFile, rows: list[dict[str, Any]], origin: str, option: str = "data") -> None:
    """Set the data: entries that say nothing but a path are written as one."""
    source.set(option, [row["path"] if set(row) == {"path"} else row for row in rows], origin)


def take_files(source: MigratedFile, path: str, split: str = "train") -> list[str]:
    """Take the files of an entry of data whose `path` is a format or a name; return the paths of all."""
    files, folder = source.take("data_files"), source.take("data_dir")
    if path in _FORMATS and (files or folder):
        source.take("ds_type")
        found = files or folder
        if isinstance(found, Mapping):
            found = found[split]
        return list(found) if isinstance(found, list) else [found]
    if files:
        source.leave("data_files", "all files of the split are trained; name each file as a path")
    if folder:
        source.leave("data_dir", "all of it is read; name the files of that folder")
    return [path]


def take_streaming(source: MigratedFile, key: str, size_key: str) -> None:
    """Take data that are read as they come, and the rows of a buffer, which mean nothing otherwise."""
    size = source.take(size_key)
    if source.take(key):
        source.set("streaming", True, key)
        if size is not None:
            source.set("buffer_size", size, size_key)


def note_coded_base(source: MigratedFile, key: str) -> None:
    """Say how a base in few bits is trained here."""
    source.leave(
        key,
        "the base is read in 16 bits. For QLoRA compress it first (`headrace compress MODEL OUT --to int4 --data FILE`) and "
        "name OUT as the model",
    )


def refuse_other_tasks(source: MigratedFile, key: str, tasks: Sequence[str]) -> None:
    """Refuse a task that is none of `tasks`: its loss or its data would be another one.

    Raises:
        ConfigError: the file asks for it.
    """
    value = source.take(key)
    if value and value not in tasks:
        raise refuse(key, value, "is not trained by this version; supervised fine-tuning and continued pre-training are")
