"""LLaMA-Factory's YAML, with the names of `dataset_info.json` where that file is found."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.migrate import preferences
from headrace.migrate.source import MigratedFile, one_reason, refuse
from headrace.migrate.training_arguments import (
    PLANNED,
    REASONS,
    module_names_of,
    note_initial_adapter_and_quantized_base,
    refuse_methods,
    refuse_other_tasks,
    set_data,
    take_adapter,
    take_streaming,
    take_training_arguments,
)

NAME = "llama-factory"

_REASONS = REASONS | {
    **one_reason(
        PLANNED,
        "cache_dir disable_gradient_checkpointing flash_attn include_* kt_* overwrite_cache pipeline_model_parallel_size "
        "preprocessing_* shift_attn tensor_model_parallel_size use_distributed_optimizer use_kt use_reentrant_gc "
        "use_v1_kernels",
    ),
    **one_reason("see quantization_bit", "double_quantization quantization_method"),
    **one_reason("words alone are trained", "image_* video_*"),
    "fp8*": "see the option compute_dtype",
    "freeze_*": "words alone are trained; --train matrices or an adapter train less",
    "plot_loss": "`headrace report RUN_DIR` has the picture",
    "template": "the chat template of the model directory is used",
    "enable_liger_kernel": "see the option liger",
    "max_samples": "write a file with so many samples",
    "resize_vocab": "a model directory is trained as it is",
}
# What would train something else: refused by name if it is on.
_REFUSED = (
    "freeze_trainable_layers mixture_of_depths pissa_init use_apollo use_asft_loss use_badam use_dft_loss "
    "use_eaft_loss use_galore use_llama_pro"
)
_ENTRY_REASONS = {
    "num_samples": "all samples are trained; write a file with so many",
    **dict.fromkeys(("ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"), "file_name or hf_hub_url is taken"),
    "folder": "name the files of that folder",
}
_COLUMN_REASONS = {
    **dict.fromkeys(("images", "videos", "audios"), "words alone are trained; data with media are refused"),
    "kto_tag": "it belongs to a stage that is refused",
}
# Names of roles that are read, the default first.
_TAGS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant", "chatgpt", "model"),
    "observation_tag": ("observation", "tool", "function_response"),
    "function_tag": ("function_call",),
    "system_tag": ("system",),
}


def recognises(values: Mapping[str, Any]) -> bool:
    """Return whether these are the keys of a LLaMA-Factory configuration."""
    return "model_name_or_path" in values and any(
        key in values for key in ("finetuning_type", "cutoff_len", "stage", "dataset_dir")
    )


def translate(source: MigratedFile) -> None:
    """Translate a LLaMA-Factory configuration.

    Raises:
        ConfigError: it asks for a task, a loss or a method that this version does not train.
    """
    refuse_other_tasks(source, "stage", ("sft", "pt", "dpo"))
    refuse_methods(source, _REFUSED)
    source.rename("model_name_or_path", "model")
    _take_data(source)
    take_streaming(source, "streaming", "buffer_size")
    length = int(source.take("cutoff_len", 2048))
    source.set("sequence_length", length, "cutoff_len")
    pretrains = source.values.get("stage") == "pt"
    source.set("packing", bool(source.take("packing", pretrains) or source.take("neat_packing")), "packing")
    pairs = source.values.get("stage") == "dpo"
    if pairs:
        settings = {"label_smoothing": "dpo_label_smoothing", "gamma": "simpo_gamma"}
        preferences.take_preferences(source, "pref_loss", "pref_beta", settings)
    if source.take("use_adam_mini"):
        source.notes.append("use_adam_mini: AdamW stands in its place; moments=int8 takes less")
    take_training_arguments(source, batch=8, rate=5e-5, epochs=3.0, length=length, pairs=pairs)
    if source.take("use_muon"):
        source.set("optimizer", "muon", "use_muon")
    held_out = source.take("val_size", 0)
    if float(held_out) > 0:
        source.set("eval_split", held_out, "val_size")
    source.rename("output_dir", "output")
    _take_adapter(source)
    source.finish(_REASONS | preferences.REASONS)


def _take_adapter(source: MigratedFile) -> None:
    kind = source.take("finetuning_type", "lora")
    if kind not in ("full", "lora"):
        raise refuse("finetuning_type", kind, "is not trained by this version; full and lora are")
    rank = int(source.values.get("lora_rank") or 8)
    targets = module_names_of(source.take("lora_target", "all"))
    if kind == "lora":
        take_adapter(source, "lora", ("lora_rank", "lora_alpha", "lora_dropout"), targets, (8, 2.0 * rank, 0.0))
    for key in ("lora_rank", "lora_alpha", "lora_dropout"):
        source.take(key)
    if source.has("loraplus_lr_ratio"):
        source.leave("loraplus_lr_ratio", "both matrices of an adapter have one learning rate")
    note_initial_adapter_and_quantized_base(source, "adapter_name_or_path", ("quantization_bit",))


def _take_data(source: MigratedFile) -> None:
    """Take data sets by the names of `dataset_info.json`, which lies in `dataset_dir`."""
    folder = Path(str(source.take("dataset_dir", "data")))
    info = _info_in(folder)
    for key, option in (("dataset", "data"), ("eval_dataset", "eval_data")):
        names = source.take(key)
        words = names.split(",") if isinstance(names, str) else names or []
        rows = [_row(source, folder, info, str(word).strip()) for word in words]
        if rows:
            set_data(source, rows, key, option)


def _info_in(folder: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((folder / "dataset_info.json").read_text("utf-8"))
        if isinstance(found, Mapping):
            return found
    return {}


def _row(source: MigratedFile, folder: Path, info: Mapping[str, Any], name: str) -> dict[str, Any]:
    entry = info.get(name)
    if not isinstance(entry, Mapping):
        source.notes.append(
            f"data: {name} is a name of {folder / 'dataset_info.json'}, which is not there or does not have it; write a file's"
        )
        return {"path": name}
    ranks = bool(entry.get("ranking"))
    if ranks != (source.values.get("stage") == "dpo"):
        raise refuse("dataset", name, f"has {'pairs to rank' if ranks else 'no pairs'}, and the file asks for another task")
    inner, place = MigratedFile(entry), f"dataset_info.{name}"
    inner.take("ranking")
    file, url = inner.take("file_name"), inner.take("hf_hub_url")
    if not file and not url:
        raise refuse("dataset", name, "has neither file_name nor hf_hub_url in dataset_info.json; name a file")
    row = {"path": str(folder / file) if file else url, "name": inner.take("subset"), "split": inner.take("split")}
    given = MigratedFile(inner.take("columns", {}))
    tags = MigratedFile(inner.take("tags", {}))
    shares = inner.take("formatting", "alpaca") == "sharegpt"
    columns = _columns_of(source, name, given, tags, shares=shares)
    source.close(given, f"{place}.columns", _COLUMN_REASONS)
    source.close(tags, f"{place}.tags", {})
    source.close(inner, place, _ENTRY_REASONS)
    columns = {ours: theirs for ours, theirs in columns.items() if theirs and theirs != ours}
    if columns:
        row["columns"] = columns
    return {key: value for key, value in row.items() if value is not None and not (key == "split" and value == "train")}


def _columns_of(source: MigratedFile, name: str, given: MigratedFile, tags: MigratedFile, *, shares: bool) -> dict[str, Any]:
    """Return the data's names of columns by ours; what LLaMA-Factory reads otherwise becomes a note."""
    stage = source.values.get("stage")
    if stage == "pt":
        return {"text": given.take("prompt", None if given.values else "instruction")}
    if stage == "dpo":
        if given.take("query") or given.take("system"):
            source.notes.append(f"data: {name} has prompts in several columns; join them into one")
        found = {ours: given.take(ours) for ours in ("prompt", "chosen", "rejected")}
        return found if shares or given.values else found | {"prompt": "instruction"}
    if shares:
        roles = _names_of_turns(tags)
        messages = given.take("messages", "conversations")
        form = "messages" if roles and messages != "conversations" else "conversations"
        return {form: messages, "tools": given.take("tools"), "system": given.take("system")}
    own = {"instruction": "prompt", "input": "query", "output": "response", "system": "system", "history": "history"}
    found = {ours: given.take(theirs) for ours, theirs in own.items()} | {"tools": given.take("tools")}
    unread = [ours for ours in ("input", "system", "history") if not found[ours] and (given.values or ours != "input")]
    source.notes.append(
        f"data: {name}: an empty line joins instruction and input here, a line break in LLaMA-Factory"
        + (f"; columns called {', '.join(unread)} are read, which columns does not name" if unread else "")
    )
    return found


def _names_of_turns(tags: MigratedFile) -> bool:
    """Return whether turns have role and content, not from and value.

    Raises:
        ConfigError: they have other names.
    """
    for key, words in _TAGS.items():
        if (word := tags.take(key, words[0])) not in words:
            raise refuse(f"tags.{key}", word, f"is not read here; rename it in the data to {' or '.join(words)}")
    role, content = tags.take("role_tag", "from"), tags.take("content_tag", "value")
    if (role, content) not in (("from", "value"), ("role", "content")):
        raise refuse(
            "tags", {"role_tag": role, "content_tag": content}, "is not read here; from and value, role and content are"
        )
    return bool(role == "role")
