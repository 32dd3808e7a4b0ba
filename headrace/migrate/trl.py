"""TRL's YAML for `trl sft`, `trl dpo` and `trl kto` (and the recipes of the alignment handbook): script, model and training
arguments in one file.
"""

from collections.abc import Mapping
from typing import Any

from headrace.migrate import preferences
from headrace.migrate.source import MigratedFile, refuse
from headrace.migrate.training_arguments import (
    PLANNED,
    REASONS,
    leave_bases,
    module_names_of,
    set_data,
    take_adapter,
    take_streaming,
    take_training_arguments,
)
from headrace.terms.options.border import JOINT
from headrace.terms.options.method_options import OF_MODEL

NAME = "trl"

_OF_OTHER_TRAINERS = ("reward_funcs", "num_generations", "cpo_alpha", "simpo_gamma")
_OF_TOKENS = ("nll", "chunked_nll", "dft")
_CHANGE_NUMBERS = ("label_smoothing_factor", "neftune_noise_alpha", "optim_target_modules", "optim_args", "lr_scheduler_kwargs")
# Keys that only trainers of pairs and of labelled completions have.
_OF_PAIRS = (
    *("beta", "loss_type", "loss_weights", "label_smoothing", "max_prompt_length", "disable_dropout", "ld_alpha"),
    *("f_divergence_type", "f_alpha_divergence_coef", "use_weighting", "discopop_tau", "precompute_ref_log_probs"),
    *("precompute_ref_batch_size", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
)
_REASONS = (
    REASONS
    | preferences.REASONS
    | {
        "activation_offloading": PLANNED,
        "append_concat_token": PLANNED,
        "assistant_only_loss": "the turns of the assistant alone are trained, wherever data are conversations",
        "average_tokens_across_devices": "the loss is the mean over a step's tokens",
        "completion_only_loss": "the completion alone is trained, wherever data have prompts",
        "dataset_kwargs": "data and template decide (docs/data.md)",
        "eos_token": "the end of turns is found in the chat template",
        "eval_packing": PLANNED,
        "label_smoothing": "TRL reads it for the losses robust and exo_pair alone; dpo:label_smoothing= is conservative DPO",
        "model_init_kwargs": "the model's files say what it is; of another revision, name its directory",
        "model_revision": "download that revision and name its directory",
        "packing_strategy": "rows are filled best fit first",
        "pad_to_multiple_of": PLANNED,
        "pad_token": "padding is masked, whatever its token",
        "padding_free": PLANNED,
        "shuffle_dataset": "samples are drawn in an order of their own in each epoch, by seed",
        "bnb_4bit_*": "see load_in_4bit",
        "use_bnb_nested_quant": "see load_in_4bit",
        "lora_task_type": PLANNED,
        "lora_modules_to_save": "embeddings and head stay frozen beside an adapter",
    }
)


def recognises(values: Mapping[str, Any]) -> bool:
    """Return whether these are the keys of a TRL configuration."""
    return "model_name_or_path" in values and any(
        key in values for key in ("dataset_name", "dataset_mixture", "dataset_mixer", "datasets")
    )


def translate(source: MigratedFile) -> None:
    """Translate a file of `trl sft`, `trl dpo` or `trl kto`.

    Raises:
        ConfigError: it is one of another trainer of TRL's.
    """
    for key in _OF_OTHER_TRAINERS:
        if source.has(key):
            raise refuse(key, source.values[key], "belongs to a trainer of TRL's that this version does not translate")
    for key in _CHANGE_NUMBERS:
        if value := source.take(key):
            raise refuse(key, value, "changes what is trained in a way that this version does not have")
    pairs = _take_loss(source)
    if pairs and source.values.get("disable_dropout") is not False:
        source.notes.append("disable_dropout: TRL trains pairs without dropout; here config.json decides, so set it to 0 there")
    source.rename("model_name_or_path", "model")
    _take_data(source)
    take_streaming(source, "dataset_streaming", "buffer_size")
    if "max_length" in source.values and source.values["max_length"] is None:
        raise refuse("max_length", None, "cuts nothing in TRL; rows have a length here: give the most tokens of one")
    if (mode := source.take("truncation_mode", "keep_start")) != "keep_start":
        raise refuse("truncation_mode", mode, "cuts the beginning; here long samples keep it: leave it out")
    length = int(source.take("max_length", source.take("max_seq_length", 1024)))
    source.set("sequence_length", length, "max_length")
    source.set("packing", bool(source.take("packing", False)), "packing")
    source.set("border", JOINT, "TRL's rule")
    rate = 1e-6 if pairs else 2e-5
    take_training_arguments(source, batch=8, rate=rate, epochs=3.0, length=length, pairs=pairs)
    if not source.has("bf16") and not source.has("fp16"):
        source.set("compute_dtype", "bfloat16", "bf16 (TRL's default)")
    # TRL trains a mixture's router by the model's own coefficient; so do dpo and kto here.
    source.set("router_aux_loss_coef", source.take("router_aux_loss_coef", None if pairs else OF_MODEL), "router_aux_loss_coef")
    source.rename("output_dir", "output")
    if source.take("use_peft"):
        targets = module_names_of(source.take("lora_target_modules"))
        take_adapter(source, "lora", ("lora_r", "lora_alpha", "lora_dropout"), targets, (16, 32, 0.05))
        if targets is None:
            source.notes.append(
                "adapter: peft chooses modules by architecture (q_proj and v_proj in Llama); here all linear ones"
            )
    leave_bases(source, "", ("load_in_4bit", "load_in_8bit"))
    source.finish(_REASONS)


def _take_loss(source: MigratedFile) -> bool:
    """Take the loss of `trl dpo` or `trl kto`, which a file shows by its keys; return whether it is one."""
    if source.values.get("loss_type") == "kto" or any(source.has(key) for key in preferences.WEIGHTS.values()):
        preferences.take_labels(source, "loss_type", "beta", preferences.WEIGHTS)
        return True
    if (kind := source.values.get("loss_type")) in _OF_TOKENS:
        if source.take("loss_type") == "dft":
            raise refuse("loss_type", kind, "is not trained by this version; nll is")
        return False
    if not any(source.has(key) for key in _OF_PAIRS):
        source.notes.append("loss: read as a file of `trl sft`; if it is one of `trl dpo` or `trl kto`, set the option loss")
        if not source.values.get("assistant_only_loss"):
            source.notes.append(
                "assistant_only_loss: TRL trains whole conversations; here only the assistant's turns are trained"
            )
        return False
    preferences.take_preferences(source, "loss_type", "beta", {})
    source.notes.append("loss: read as a file of `trl dpo`; if it is one of another trainer of pairs, set the option loss")
    return True


def _take_data(source: MigratedFile) -> None:
    """Take one data set, or a mixture of several."""
    mixture = source.take("dataset_mixture") or {}
    several = mixture.get("datasets", []) if isinstance(mixture, Mapping) else []
    several = source.take("datasets", several)
    if mixer := source.take("dataset_mixer"):
        several = [{"id": name, "weight": weight} for name, weight in mixer.items()]
        source.take("dataset_splits")
    if name := source.take("dataset_name"):
        several = [{"id": name, "config": source.take("dataset_config"), "split": source.take("dataset_train_split")}]
    text = source.take("dataset_text_field", "text")
    rows = []
    for each in several:
        row = {
            "path": each.get("id") or each.get("path"),
            "name": each.get("config") or each.get("name"),
            "split": each.get("split") if each.get("split") != "train" else None,
            "weight": each.get("weight") if each.get("weight") != 1.0 else None,
            "columns": {"text": text} if text != "text" else None,
        }
        rows.append({key: value for key, value in row.items() if value is not None})
    set_data(source, rows, "dataset_name" if name else "dataset_mixture")
    evaluates = source.values.get("eval_strategy", "no") not in ("no", False, None)
    if (test := source.take("dataset_test_split")) and len(rows) == 1 and evaluates:
        held_out = {key: value for key, value in rows[0].items() if key in ("path", "name", "columns")} | {"split": test}
        source.set("eval_data", [held_out], "dataset_test_split")
    source.rename("chat_template_path", "chat_template")
    if isinstance(mixture, Mapping) and mixture.get("test_split_size"):
        source.set("eval_split", mixture["test_split_size"], "dataset_mixture.test_split_size")
