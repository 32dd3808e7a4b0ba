"""A model's configuration without its weights: from a directory, a config.json, or the Hub.

Invariant: the result names every size that decides memory and time. For a size that a file leaves out, transformers would fill
in another model's, and a plan would be printed for that model.
"""

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from headrace.codec.table import Code
from headrace.files.hub import HUB_SECONDS, hub_answers
from headrace.files.model_directory import absent, has_weights, read_configuration, refuse_no_configuration
from headrace.model import Checkpoint, describe, text_config
from headrace.model.blocks.find_blocks import quantisation_of
from headrace.model.blocks.text_part import text_part
from headrace.terms.errors import ConfigError, ModelError, in_one_line

# Names as in transformers; each architecture's `attribute_map` says what its files call them.
_NEEDED = ("hidden_size", "num_hidden_layers", "vocab_size")
_NEEDED_WHERE_KNOWN = ("num_attention_heads", "intermediate_size")


def read_parts(model: str | Path) -> tuple[Any, Any | None]:
    """Return the configuration of the model that is trained, and the skeleton of the whole model if that is only a part of it.

    `model` is a directory with a config.json, such a file, or the name of a model on the Hub.

    Raises:
        ModelError: there is no such file or model, it is not JSON, transformers does not know the architecture, or sizes are
            missing.
    """
    path = _config_file(model)
    values = read_configuration(path)
    if not isinstance(values.get("model_type"), str):
        raise ModelError(f"{path}: model_type is {values.get('model_type')!r}; it names the architecture, such as llama")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for what a file may hold
        raise ModelError(f"{path}: transformers does not accept it: {in_one_line(error)}") from error
    _check_sizes(values, config, path)
    return text_part(config)


def as_decoded(config: Any) -> str:
    """Take the codes of weights out of a configuration, and return a note on that for a person."""
    note = f"no weight files here: weights coded as {quantisation_of(config)} are planned as decoded, as they are trained"
    del config.quantization_config
    return note


def open_coded(model: str | Path, compress: str | None = None) -> Checkpoint:
    """Return the checkpoint of a model whose weights are coded already: its files, or what its configuration says of them.

    Raises:
        ConfigError: only its files say how small the weights are, and they are not here; or it is to be compressed once more.
        ModelError: it cannot be read.
    """
    if compress is not None:
        raise ConfigError(f"compress: {model} is coded already; leave --compress out to plan with its own code")
    if has_weights(model):
        return Checkpoint.open(model, decode=True)
    path = _config_file(model)
    return describe(path, AutoConfig.from_pretrained(path, trust_remote_code=False))


def refuse_other_dtypes(code: Code, config: Any) -> None:
    """Refuse a lossless code, which is for bfloat16, for a model that says that its weights are of another dtype.

    Raises:
        ConfigError: it says so.
    """
    dtype = str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch.")
    if code.lossless and dtype != "bfloat16":
        raise ConfigError(f"compress: {code.name} codes bfloat16 as it is, the model's weights are {dtype}; give int4")


def check_positions(config: Any, sequence_length: int) -> None:
    """Refuse sequences for which the model has no positions.

    Raises:
        ConfigError: `sequence_length` is above the configuration's.
    """
    positions = position_limit(config)
    if positions and sequence_length > positions:
        raise ConfigError(
            f"sequence_length: {sequence_length} is more than the {positions} positions of the model; use at most that, or "
            "raise max_position_embeddings in its config.json if the model's positions may be stretched"
        )


def position_limit(config: Any) -> int | None:
    """Return the number of positions that the model has; None where it has no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _config_file(model: str | Path) -> Path:
    path = Path(model)
    refuse_no_configuration(str(model))
    if path.is_dir() or path.is_symlink():
        return path / "config.json"
    return path if path.is_file() else _from_hub(str(model))


def _from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # late: most plans are for local models

    kept = try_to_load_from_cache(name, "config.json")
    if isinstance(kept, str):
        return Path(kept)
    if not hub_answers(name):
        raise absent(name, f" here, and the Hub did not answer within {HUB_SECONDS:g} seconds")
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # no network, no such model, no access: the Hub's library has an error for each
        reason = str(error).strip().splitlines()
        said = f"{type(error).__name__}: {reason[0] if reason else 'no reason given'}"
        raise absent(name, f" here, and its config.json could not be fetched from the Hub ({said})") from error


def _check_sizes(values: dict[str, Any], config: Any, path: Path) -> None:
    """Refuse a file that lacks one of these sizes, or has an impossible one."""
    text = text_config(config)
    # A model of several kinds of input has its language model's sizes in a part of its own.
    given = {**values, **next((part for part in values.values() if _describes(part, text)), {})}
    names = dict(getattr(text, "attribute_map", {}))
    wanted = [*_NEEDED, *(name for name in _NEEDED_WHERE_KNOWN if isinstance(getattr(text, name, None), int))]
    missing = [names.get(name, name) for name in wanted if name not in given and names.get(name, name) not in given]
    if missing:
        raise ModelError(f"{path}: {', '.join(missing)} missing; without it the model's size is unknown: fetch the file again")
    for name in wanted:
        size = getattr(text, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ModelError(f"{path}: {names.get(name, name)} is {size!r}; expected a whole number above 0")


def _describes(part: object, text: Any) -> bool:
    return isinstance(part, dict) and part.get("model_type") == text.model_type
