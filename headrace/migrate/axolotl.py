"""axolotl's YAML."""

from collections.abc import Mapping
from typing import Any

from headrace.migrate import preferences
from headrace.migrate.source import MigratedFile, one_reason, refuse
from headrace.migrate.training_arguments import (
    LOGGED,
    PLANNED,
    REASONS,
    module_names_of,
    note_initial_adapter_and_quantized_base,
    refuse_methods,
    refuse_other_tasks,
    set_data,
    take_adapter,
    take_common,
    take_files,
    take_optimizer,
    take_rows,
    take_saving,
    take_schedule,
    take_streaming,
)

NAME = "axolotl"

_TOKENIZER = "the tokenizer and the chat template of the model directory are used"
_REASONS = REASONS | {
    **one_reason("see load_in_4bit", "bnb_config_kwargs quantize_moe_experts"),
    **one_reason(
        PLANNED,
        "activation_offloading context_parallel_size cut_cross_entropy dataset_* device_map dp_* eval_batch_size "
        "eval_sample_packing experimental_skip_move_to_device expert_parallel* experts_implementation flash_attention "
        "flash_attn* flex_attn* local_rank lora_*_kernel lora_mlp_kernel lora_o_kernel lora_qkv_kernel pad_to_sequence_len "
        "plugins sample_packing_* sdp_attention skip_prepare_dataset tensor_parallel_size tiled_mlp use_kernels "
        "use_scattermoe use_sonicmoe xformers_attention",
    ),
    **one_reason(_TOKENIZER, "chat_template* special_tokens tokenizer* tokens"),
    **one_reason("the architecture is read from config.json", "is_* model_type"),
    **one_reason("see report_to", "trackio_* wandb_*"),
    "auto_resume_from_checkpoints": "`headrace resume RUN_DIR` resumes a run",
    "curriculum_sampling": "see the option shuffle",
    "hf_use_auth_token": "the token of the Hub's own login is used",
    "model_quantization_config*": "a coded model is read as it is (docs/compress.md)",
    "revision_of_model": "download that revision and name its directory",
    "base_model_config": "the configuration of the model directory is used",
    "base_model_ignore_patterns": "safetensors alone are read",
    "eot_tokens": "the end of turns is found in the chat template",
    "eval_table_size": LOGGED,
    "evals_per_epoch": "one evaluation an epoch is the default; for more set eval_steps",
    "group_by_length": "rows are filled best fit first",
    "gptq*": "see docs/compress.md for coded models",
    "liger_*": "see the option liger",
    "lora_fan_in_fan_out": "it follows from the module",
    "lora_modules_to_save": "embeddings and head stay frozen beside an adapter",
    "loss_watchdog_*": "a step with a gradient that is not finite is skipped",
    "processor_type": "words alone are trained",
    "saves_per_epoch": "with save_total_limit a run keeps a model at the end of each epoch; for more set save_steps",
    "shuffle_merged_datasets": "the order is shuffled in each pass; see the option shuffle",
    "strict": "unknown keys are refused",
    "swanlab_*": "there is no logger swanlab",
    "train_on_inputs": "everything is trained where data are text; of conversations the turns of the assistant",
}
# What would train something else: refused by name if it is on.
_REFUSED = "reward_model process_reward_model qat diffusion relora lisa_n_layers unfrozen_parameters use_eaft"
# Of an entry of data sets.
_ROW_REASONS = {
    "shards*": "all samples are trained; write a file with that share",
    "train_on_eos": "the end of each trained turn is trained",
    "ds_type": "files are read by their ending",
    "chat_template*": _TOKENIZER,
    "trust_remote_code": "code of data sets is never run",
    "conversation": "the chat template of the model directory is used",
    "roles": "human and gpt, user and assistant, system and tool are roles (docs/data.md)",
    "revision": "download that revision and name its files",
    "message_field_*": "role and content, or from and value, are read",
    "preprocess_shards": PLANNED,
}
# Of a `type` that is a mapping: our names of columns by its fields, and what has no counterpart.
_FIELDS = {each: each for each in ("instruction", "input", "output", "system", "prompt", "chosen", "rejected", "completion")}
_FIELDS |= {"label": "label", "messages": "messages"}
_TEMPLATE = "the chat template of the model directory writes the text"
_TYPE_REASONS = {
    **dict.fromkeys(("format", "no_input_format", "system_format"), _TEMPLATE),
    **dict.fromkeys(("prompt_format", "chosen_format", "rejected_format", "completion_format"), _TEMPLATE),
    "system_prompt": "write it into the data, as a column system",
}
_FORMS = ("alpaca", "chat_template", "completion", "pretrain", "sharegpt", "input_output")


def recognises(values: Mapping[str, Any]) -> bool:
    """Return whether these are the keys of an axolotl configuration."""
    return "base_model" in values


def translate(source: MigratedFile) -> None:
    """Translate an axolotl configuration.

    Raises:
        ConfigError: it asks for a loss, a method or data that this version does not train.
    """
    rl = source.values.get("rl")
    refuse_other_tasks(source, "rl", ("dpo", "ipo", "orpo", "kto"))
    refuse_methods(source, _REFUSED)
    source.rename("base_model", "model")
    _take_data(source)
    take_streaming(source, "streaming", "streaming_multipack_buffer_size")
    length = int(source.take("sequence_len", 512))
    source.set("sequence_length", length, "sequence_len")
    source.set("packing", bool(source.take("sample_packing", False)), "sample_packing")
    if rl:
        _take_loss(source, rl)
    if source.has("batch_size") and not source.has("gradient_accumulation_steps"):
        take_rows(source, "batch_size", 1, length, pairs=bool(rl))
        source.take("micro_batch_size")
    else:
        take_rows(source, "micro_batch_size", 1, length, pairs=bool(rl))
    source.rename("learning_rate", "learning_rate", float)
    source.set("epochs", float(source.take("num_epochs", 1)), "num_epochs")
    source.rename("max_steps", "max_steps", int)
    take_optimizer(source, source.take("optimizer", "adamw_torch_fused"), "optimizer")
    take_schedule(source, source.take("lr_scheduler", "cosine"), "lr_scheduler")
    if source.has("wandb_project"):
        source.set("report_to", ["wandb"], "wandb_project")
    take_common(source)
    take_saving(source)
    held_out = source.take("val_set_size", 0)
    if float(held_out) > 0:
        source.set("eval_split", held_out, "val_set_size")
    source.rename("output_dir", "output")
    _take_adapter(source)
    source.finish(_REASONS | preferences.REASONS)


def _take_loss(source: MigratedFile, rl: str) -> None:
    """Take the loss of preferences that `rl` names."""
    if rl == "kto":
        weights = {"desirable_weight": "kto_desirable_weight", "undesirable_weight": "kto_undesirable_weight"}
        preferences.take_labels(source, "rl", "rl_beta", weights)
        return
    beta = "orpo_alpha" if rl == "orpo" else "dpo_beta" if source.has("dpo_beta") else "rl_beta"
    preferences.take_preferences(source, "rl", beta, {"label_smoothing": "dpo_label_smoothing"})


def _take_adapter(source: MigratedFile) -> None:
    kind = source.take("adapter")
    targets, experts = (
        module_names_of(source.take("lora_target_modules")),
        module_names_of(source.take("lora_target_parameters")),
    )
    if source.take("lora_target_linear"):
        targets = "all-linear"
    if experts:
        experts = "+".join(sorted({name[name.rfind("experts") :] for name in experts.split("+")}))
        targets = f"{targets or 'all-linear'}+{experts}"
    if kind in ("lora", "qlora"):
        take_adapter(source, "lora", ("lora_r", "lora_alpha", "lora_dropout"), targets, (8, 16, 0.0))
        if isinstance(source.values.get("lora_target_modules"), str) and targets is None:
            source.leave("lora_target_modules", "a pattern; name the ends of module names in target_modules")
    elif kind:
        raise refuse("adapter", kind, "is not an adapter that this version trains; lora, dora and qlora are")
    for key in ("lora_r", "lora_alpha", "lora_dropout"):
        source.take(key)
    note_initial_adapter_and_quantized_base(source, "lora_model_dir", ("load_in_4bit", "load_in_8bit"))


def _take_data(source: MigratedFile) -> None:
    """Take data sets, those of pre-training too, and held-out ones."""
    for key, option in (("datasets", "data"), ("pretraining_dataset", "data"), ("test_datasets", "eval_data")):
        several = source.take(key)
        if not several:
            continue
        rows: list[dict[str, Any]] = []
        for number, each in enumerate(several):
            rows += [{"path": each}] if isinstance(each, str) else _rows(source, f"{key}[{number}]", each)
        set_data(source, rows, key, option)


def _rows(source: MigratedFile, place: str, each: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what an entry of data sets becomes: a row for each of its files."""
    inner = MigratedFile(each)
    path, split = each["path"], inner.take("split", "train")
    inner.take("path")
    row = {"name": inner.take("name"), "split": split if split != "train" else None}
    paths = take_files(inner, path, split)
    form = inner.take("type")
    own = _columns_of_type(source, f"{place}.type", form) if isinstance(form, Mapping) else {}
    name = str(form).partition(":")[0].partition(".")[0] if isinstance(form, str) else None
    if name is not None and name not in _FORMS:
        source.notes.append(f"{place}: {path}: the form {form!r} is axolotl's; here columns decide (docs/data.md)")
    if name == "alpaca":
        source.notes.append(
            f"{place}: {path}: alpaca's text around instructions is axolotl's; here the chat template writes it"
        )
    roles = inner.take("roles_to_train", [])
    if not set(roles) <= {"assistant", "gpt", "model"}:
        raise refuse(f"{place}.roles_to_train", roles, "is not trained by this version; turns of the assistant are")
    mapping = inner.take("message_property_mappings", {})
    if not set(mapping.items()) <= {("role", "role"), ("content", "content"), ("role", "from"), ("content", "value")}:
        raise refuse(f"{place}.message_property_mappings", dict(mapping), "is not read; role and content, from and value are")
    messages = "conversations" if "from" in mapping.values() else "messages"
    renamed = {"text": inner.take("field"), messages: inner.take("field_messages")}
    renamed |= {"tools": inner.take("field_tools"), "system": inner.take("field_system")}
    columns = {ours: theirs for ours, theirs in (renamed | own).items() if theirs and theirs not in (ours, "conversations")}
    source.close(inner, place, _ROW_REASONS)
    more = {"columns": columns} if columns else {}
    return [{key: value for key, value in {**row, "path": path, **more}.items() if value is not None} for path in paths]


def _columns_of_type(source: MigratedFile, place: str, form: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a form of the user's own names, by ours."""
    inner = MigratedFile(form)
    columns = {ours: inner.take(f"field_{theirs}") for ours, theirs in _FIELDS.items() if inner.has(f"field_{theirs}")}
    if inner.has("field"):
        columns["text"] = inner.take("field")
    source.close(inner, place, _TYPE_REASONS)
    return columns
