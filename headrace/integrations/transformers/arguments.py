"""Each field of TrainingArguments, each argument and overridable method of Trainer: honoured, ignored with a note, or refused.

Invariant: nothing is ignored silently. A field that stands in none of these tables is refused if it is set, and a test fails.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import TrainingArguments

from headrace.terms.errors import ConfigError

HONOURED = frozenset(
    (
        *("output_dir", "per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type"),
        *("lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2"),
        *("adam_epsilon", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "torch_compile", "use_liger_kernel"),
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "include_num_input_tokens_seen"),
        *("log_level", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
        *("trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size"),
        *("eval_on_start", "save_strategy", "save_steps", "save_total_limit", "enable_jit_checkpoint", "metric_for_best_model"),
        *("greater_is_better", "load_best_model_at_end", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        *("full_determinism", "seed", "data_seed", "accelerator_config", "dataloader_drop_last", "dataloader_num_workers"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        *("dataloader_in_order", "remove_unused_columns", "train_sampling_strategy", "length_column_name"),
        *("skip_memory_metrics", "do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
    )
)
_ONE_PROCESS = "one process trains"
_RECOMPUTED = "blocks are always recomputed"
_NO_LOGITS = "evaluation gives losses, no logits"
_HUB = "only push_to_hub reads it"
IGNORED: Mapping[str, str] = {
    "average_tokens_across_devices": f"{_ONE_PROCESS}; the loss is always the mean over the step's trained tokens",
    "bf16_full_eval": "evaluation computes as training does",
    "fp16_full_eval": "evaluation computes as training does",
    "tf32": "products in float32 are as torch is set",
    "activation_checkpointing": _RECOMPUTED,
    "activation_checkpointing_kwargs": _RECOMPUTED,
    "gradient_checkpointing": _RECOMPUTED,
    "gradient_checkpointing_kwargs": _RECOMPUTED,
    "use_cache": "training has no cache",
    "torch_empty_cache_steps": "the plan says what is on the device",
    "auto_find_batch_size": "the plan finds micro-batches that fit; the batch stays as it was asked for",
    "log_on_each_node": _ONE_PROCESS,
    "log_level_replica": _ONE_PROCESS,
    "prediction_loss_only": _NO_LOGITS,
    "eval_do_concat_batches": _NO_LOGITS,
    "eval_use_gather_object": _NO_LOGITS,
    "eval_accumulation_steps": _NO_LOGITS,
    "include_for_metrics": _NO_LOGITS,
    "batch_eval_metrics": _NO_LOGITS,
    "save_only_model": "checkpoint-N has the model only; what resuming needs is committed after each step",
    "save_on_each_node": _ONE_PROCESS,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "dataloader_pin_memory": "batches stay on the host, where the engine reads them",
    "ddp_find_unused_parameters": _ONE_PROCESS,
    "ddp_bucket_cap_mb": _ONE_PROCESS,
    "ddp_broadcast_buffers": _ONE_PROCESS,
    "ddp_static_graph": _ONE_PROCESS,
    "ddp_backend": _ONE_PROCESS,
    "ddp_timeout": _ONE_PROCESS,
    "fsdp_config": "only fsdp reads it",
    "local_rank": _ONE_PROCESS,
}
_STREAMED = "leave it out: the engine streams the model from SSD within host_memory and device_memory"
REFUSED: Mapping[str, str] = {
    "optim_target_modules": "leave it out, or train an adapter by peft_config",
    "label_smoothing_factor": "leave it out: the loss is the cross-entropy of tokens",
    "torch_compile_backend": "leave it out: torch_compile=True compiles blocks as torch does by default",
    "torch_compile_mode": "leave it out: torch_compile=True compiles blocks as torch does by default",
    "liger_kernel_config": "leave it out: use_liger_kernel=True takes the kernels that the engine can",
    "neftune_noise_alpha": "leave it out: embeddings get no noise",
    "push_to_hub": "train, call save_model(DIR), then upload DIR with huggingface_hub; output_dir also holds the run's state",
    "use_cpu": "with a GPU, it computes; hide it with CUDA_VISIBLE_DEVICES=''",
    "parallelism_config": _STREAMED,
    "label_names": "leave it out: targets are the batch's labels",
    "fsdp": _STREAMED,
    "deepspeed": _STREAMED,
    "debug": "leave it out: it looks into modules, which hold no weights here",
}
# The fields that SFTConfig of TRL has besides.
SFT_HONOURED = frozenset(
    (
        *("max_length", "packing", "eval_packing", "dataset_text_field", "chat_template_path", "eos_token", "pad_token"),
        *("completion_only_loss", "assistant_only_loss", "router_aux_loss_coef", "shuffle_dataset"),
    )
)
SFT_IGNORED: Mapping[str, str] = {
    "padding_free": "the numbers are those of padded rows; packing=True packs them",
    "dataset_num_proc": "data are tokenised once, and kept",
    "pad_to_multiple_of": "rows are as long as the longest",
    "activation_offloading": _RECOMPUTED,
}
SFT_REFUSED: Mapping[str, str] = {
    "model_init_kwargs": "the model's files say what it is; leave it out",
    "trust_remote_code": "models are transformers' own; leave it out",
    "dataset_kwargs": "rows with input_ids are not prepared again; leave it out",
    "truncation_mode": "long samples keep their beginning; leave it out",
    "packing_strategy": "samples stay whole, by best fit (bfd); leave it out",
    "loss_type": "the loss is the cross-entropy of tokens (nll); leave it out",
}
# Arguments of TRL's other trainers, and what trains the same.
_COMMAND = "`headrace train MODEL DATA --loss {}` trains that"
OTHER_CLASSES: Mapping[str, str] = {
    "DPOConfig": _COMMAND.format("dpo"),
    "KTOConfig": _COMMAND.format("kto"),
    "GRPOConfig": _COMMAND.format("grpo"),
    "ORPOConfig": _COMMAND.format("orpo"),
    "CPOConfig": f"{_COMMAND.format('simpo')} where loss_type is simpo",
    "RewardConfig": "reward models are not trained: no --loss of `headrace train` does it",
}
# Other values that mean what is done.
_SAME: Mapping[str, tuple[Any, ...]] = {"label_names": (["labels"],), "loss_type": ("chunked_nll",)}
# Arguments of Trainer's constructor.
ARGUMENTS_HONOURED = (
    *("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "callbacks"),
    *("peft_config", "ssd", "host_memory", "device_memory", "machine", "plan", "cache", "sequence_length"),
)
ARGUMENTS_REFUSED: Mapping[str, str] = {
    "model_init": "give the model's directory or name as model",
    "compute_loss_func": "train with Engine.open(seams=Seams(token_loss=...)), as docs/extending.md shows",
    "compute_metrics": f"{_NO_LOGITS}: evaluate() returns eval_loss; compute others from what save_model wrote",
    "optimizers": "choose by optim, or override create_optimizer and create_scheduler",
    "optimizer_cls_and_kwargs": "choose by optim, or override create_optimizer",
    "preprocess_logits_for_metrics": _NO_LOGITS,
}
# Methods that a subclass cannot replace: the engine's step does their work.
_OF_ENGINE = "the engine's step does this"
METHODS_REFUSED: Mapping[str, str] = {
    "compute_loss": "train with Engine.open(seams=Seams(token_loss=...)), as docs/extending.md shows",
    "training_step": _OF_ENGINE,
    "prediction_step": _NO_LOGITS,
    "evaluation_loop": _NO_LOGITS,
    "predict": _NO_LOGITS,
    "hyperparameter_search": "begin a run with an output_dir of its own for each trial",
    "call_model_init": "give the model's directory or name as model",
    "push_to_hub": REFUSED["push_to_hub"],
    "compute_loss_context_manager": _OF_ENGINE,
    "autocast_smart_context_manager": _OF_ENGINE,
}
METHODS_HONOURED = frozenset(
    (
        *("add_callback", "pop_callback", "remove_callback", "train", "evaluate", "save_model", "log", "end"),
        *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "create_optimizer", "create_scheduler"),
        *("create_optimizer_and_scheduler", "get_decay_parameter_names", "get_optimizer_cls_and_kwargs", "num_examples"),
        *("get_batch_samples", "set_initial_training_values", "get_total_train_batch_size", "floating_point_ops"),
        *("store_flos", "is_local_process_zero", "is_world_process_zero", "create_model_card", "init_hf_repo"),
        *("create_accelerator_and_postprocess", "get_sp_size", "get_cp_size", "get_tp_size", "log_metrics", "save_metrics"),
        *("metrics_format", "save_state", "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_group"),
    )
)


def check_arguments(args: Any, given: Mapping[str, Any]) -> list[str]:
    """Return a note for each field of `args` that is set and ignored. `given` are Trainer's other arguments.

    Raises:
        ConfigError: something is asked for that the engine does not do.
    """
    refuse_other_classes(type(args))
    for name, why in ARGUMENTS_REFUSED.items():
        if given.get(name) not in (None, (None, None)):
            raise ConfigError(f"{name}: HeadraceTrainer has none; {why}")
    if args.world_size > 1:
        raise ConfigError(f"{args.world_size} processes: HeadraceTrainer trains in one; `headrace train` runs under torchrun")
    # What a class may make only where there is a GPU is given, so that one of defaults can be made anywhere.
    here = {name: getattr(args, name) for name in ("use_cpu", "bf16", "fp16")}
    usual = type(args)(output_dir=args.output_dir, **here)
    changed = {name for name in vars(usual) if name in fields_of(args) and getattr(args, name) != getattr(usual, name)}
    if gpu_is_there() and args.use_cpu != type(args).__dataclass_fields__["use_cpu"].default:
        changed.add("use_cpu")  # without a GPU, it says what is done
    changed.discard("dataloader_pin_memory")  # transformers changes it, too
    refused = {**REFUSED, **SFT_REFUSED}
    known = HONOURED | IGNORED.keys() | SFT_HONOURED | SFT_IGNORED.keys() | refused.keys()
    for name in sorted(changed):
        if name in refused and getattr(args, name) not in _SAME.get(name, ()):
            raise ConfigError(f"{name}: {getattr(args, name)!r} is not done by HeadraceTrainer; {refused[name]}")
        if name not in known:
            raise ConfigError(f"{name}: HeadraceTrainer does not know this field of {type(args).__name__}; leave it out")
    notes = {**IGNORED, **SFT_IGNORED}
    return [f"{name} is ignored: {notes[name]}" for name in sorted(changed) if name in notes]


def refuse_other_classes(kind: type) -> None:
    """Refuse arguments of a trainer of TRL's that trains something else than tokens.

    Raises:
        ConfigError: they are; the message says which option of `headrace train` does the same.
    """
    for each in kind.__mro__:
        if each.__name__ == "SFTConfig" or each is TrainingArguments:
            return
        of_trl = each.__module__.partition(".")[0] == "trl" and not each.__name__.startswith("_")
        if each.__name__ in OTHER_CLASSES or of_trl:
            why = OTHER_CLASSES.get(each.__name__, "its trainer's loss is none of Headrace's")
            raise ConfigError(f"args: {each.__name__} is not trained by HeadraceTrainer, which trains on tokens; {why}")


def gpu_is_there() -> bool:
    """Return whether the engine will compute on a GPU."""
    return torch.cuda.is_available()


def fields_of(args: Any) -> set[str]:
    """Return the names of the fields of a dataclass of arguments."""
    return set(type(args).__dataclass_fields__)


def refusing_method(name: str) -> Callable[..., Any]:
    """Return a method that refuses what it is called for, as `METHODS_REFUSED` says."""

    def refused(self: Any, *given: Any, **more: Any) -> Any:
        raise ConfigError(f"{name}: HeadraceTrainer has none; {METHODS_REFUSED[name]}")

    return refused


def check_methods(kind: type, ours: type) -> None:
    """Refuse a subclass `kind` of `ours` that replaces what the engine does.

    Raises:
        ConfigError: it does.
    """
    for name, why in METHODS_REFUSED.items():
        if getattr(kind, name, None) is not getattr(ours, name, None):
            raise ConfigError(f"{kind.__name__}.{name}: HeadraceTrainer does not call it; {why}")
