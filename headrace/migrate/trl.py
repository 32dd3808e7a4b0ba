"""TRL's YAML for `trl sft`, `trl dpo` and `trl kto` (and the recipes of the alignment handbook): script, model and training
arguments in one file.
"""

from collections.abc import Mapping
from typing import Any

from headrace.migrate import preferences
from headrace.migrate.source import MigratedFile, one_reason, refuse
from headrace.migrate.training_arguments import (
    PLANNED,
    REASONS,
    module_names_of,
    note_initial_adapter_and_quantized_base,
    set_data,
    take_adapter,
    take_files,
    take_streaming,
    take_training_arguments,
)
from headrace.terms.options.border import JOINT
from headrace.terms.options.method_options import OF_MODEL

NAME = "trl"
# Its commands and scripts that are translated.
TRAINERS = ("sft", "dpo", "kto")

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
        **one_reason(
            PLANNED, "activation_offloading append_concat_token eval_packing lora_task_type pad_to_multiple_of padding_free"
        ),
        **one_reason("see load_in_4bit", "bnb_4bit_* use_bnb_nested_quant"),
        "assistant_only_loss": "the turns of the assistant alone are trained, wherever data are conversations",
        "average_tokens_across_devices": "the loss is the mean over a step's tokens",
        "completion_only_loss": "the completion alone is trained, wherever data have prompts",
        "dataset_kwargs": "data and template decide (docs/data.md)",
        "env": "variables of the environment: set them where Headrace runs, if a library reads them",
        "eos_token": "the end of turns is found in the chat template",
        "label_smoothing": "TRL reads it for the losses robust and exo_pair alone; dpo:label_smoothing= is conservative DPO",
        "model_init_kwargs": "the model's files say what it is; of another revision, name its directory",
        "model_revision": "download that revision and name its directory",
        "packing_strategy": "rows are filled best fit first",
        "pad_token": "padding is masked, whatever its token",
        "shuffle_dataset": "samples are drawn in an order of their own in each epoch, by seed",
        "lora_modules_to_save": "embeddings and head stay frozen beside an adapter",
    }
)
_ENTRY_REASONS = {
    "columns": "columns are found by their names (docs/data.md); remove others from the data",
    "fraction": "it counts against the rows of the other data sets: set weight, so that the shares are those",
    "revision": "download that revision and name its files",
}
_MIXTURE_REASONS = {"seed": "seed draws the order of samples"}


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
    take_streaming(source, "streaming" if source.has("streaming") else "dataset_streaming", "buffer_size")
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
    note_initial_adapter_and_quantized_base(source, "", ("load_in_4bit", "load_in_8bit"))
    source.finish(_REASONS)


def _take_loss(source: MigratedFile) -> bool:
    """Take the loss of the trainer that a command names, or that a file shows by its keys; return whether it is of pairs."""
    labels = source.values.get("loss_type") == "kto" or any(source.has(key) for key in preferences.WEIGHTS.values())
    if source.trainer == "kto" or (source.trainer is None and labels):
        preferences.take_labels(source, "loss_type", "beta", preferences.WEIGHTS)
        return True
    kind = source.values.get("loss_type")
    of_tokens = source.trainer == "sft" or (source.trainer is None and kind in _OF_TOKENS)
    if of_tokens and source.take("loss_type") not in (None, "nll", "chunked_nll"):
        raise refuse("loss_type", kind, "is not trained by this version; nll is")
    if source.trainer == "dpo" or (not of_tokens and any(source.has(key) for key in _OF_PAIRS)):
        preferences.take_preferences(source, "loss_type", "beta", {})
        if source.trainer is None:
            source.notes.append(
                "loss: read as a file of `trl dpo`; if it is one of another trainer of pairs, set the option loss"
            )
        return True
    if not of_tokens:
        source.notes.append("loss: read as a file of `trl sft`; if it is one of `trl dpo` or `trl kto`, set the option loss")
    if kind is None and not source.values.get("assistant_only_loss"):
        source.notes.append("assistant_only_loss: TRL trains whole conversations; here only the assistant's turns are trained")
    return False


def _take_data(source: MigratedFile) -> None:
    """Take one data set, or a mixture of several, each key of whose entries counts."""
    name, text = source.take("dataset_name"), source.take("dataset_text_field", "text")
    options = {"text": text} if text != "text" else {}
    evaluates = source.values.get("eval_strategy", "no") not in ("no", False, None)
    rows, held_out = _take_mixture(source, options)
    if rows and name:
        source.leave("dataset_name", "TRL ignores it where several data sets are named")
    elif name:
        split, test = source.take("dataset_train_split", "train"), source.take("dataset_test_split", "test")
        rows = [_row({"path": name, "name": source.take("dataset_config"), "split": split, "columns": options})]
        held_out = [{**rows[0], "split": test}]
    origin = next((key for key in ("datasets", "dataset_mixture", "dataset_mixer") if source.has(key)), "dataset_name")
    set_data(source, rows, origin)
    if evaluates and held_out:
        set_data(source, held_out, "dataset_splits" if origin == "dataset_mixer" else "dataset_test_split", "eval_data")
    source.rename("chat_template_path", "chat_template")


def _take_mixture(source: MigratedFile, options: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of `datasets`, `dataset_mixture` or `dataset_mixer`, and those that are held out by the last one."""
    place, mixture = "dataset_mixture", MigratedFile(source.take("dataset_mixture", {}))
    several = mixture.take("datasets", [])
    if source.has("datasets"):
        place, several = "datasets", source.take("datasets")
    size = source.take("test_split_size", mixture.take("test_split_size"))
    if size and several:
        source.set("eval_split", size, f"{place}.test_split_size" if mixture.has("test_split_size") else "test_split_size")
    source.close(mixture, "dataset_mixture", _MIXTURE_REASONS)
    rows = [row for number, each in enumerate(several) for row in _rows(source, f"{place}[{number}]", each, options)]
    mixer, splits = source.take("dataset_mixer", {}), source.take("dataset_splits", ["train", "test"])
    configs = source.take("dataset_configs", [None] * len(mixer))
    held_out = []
    for (path, weight), config in zip(mixer.items(), configs, strict=True):
        one = {"path": path, "name": config, "columns": options}
        rows += [_row({**one, "weight": weight, "split": split}) for split in splits if "train" in split]
        held_out += [_row({**one, "split": split}) for split in splits if "train" not in split]
    if any("weight" in row for row in rows):
        source.notes.append(
            "weight: the recipes keep that share of the rows; here other rows come in each epoch (docs/data.md)"
        )
    return rows, held_out


def _rows(source: MigratedFile, place: str, each: Mapping[str, Any], options: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what an entry of a mixture becomes: a row for each of its files."""
    inner = MigratedFile(each)
    path, config = inner.take("path", inner.take("id")), inner.take("name", inner.take("config"))
    split, weight = inner.take("split", "train"), inner.take("weight")
    paths = take_files(inner, path, split)
    source.close(inner, place, _ENTRY_REASONS)
    return [_row({"path": one, "name": config, "split": split, "weight": weight, "columns": options}) for one in paths]


def _row(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of data without what says nothing."""
    return {key: value for key, value in values.items() if value not in (None, {}, {"split": "train", "weight": 1}.get(key))}
