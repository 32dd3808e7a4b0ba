"""From options to token batches: the tokenizer, the token set, the stream, and the choices that depend on them.

Invariant: everything that can be wrong with the user's data or tokenizer is found here, before the engine allocates anything.
"""

import math
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer

from headrace.data.batches.batches import Batches
from headrace.data.batches.held_out import split_off
from headrace.data.batches.stream import BatchStream
from headrace.data.batches.streamed import StreamedBatches
from headrace.data.read.sources import find_sources
from headrace.data.tokens.tokenize import asks_for_date, earlier_tokens, load_tokens
from headrace.data.values.tokens import TokenSet
from headrace.data.values.values import Batch, DataSpec
from headrace.files.model_directory import TOKENIZER_FILES, has_tokenizer, read_configuration, refuse_no_model
from headrace.terms.errors import ConfigError, DataError, ModelError, refusing, shortened
from headrace.terms.json_text import parse_json
from headrace.terms.options.border import border_of
from headrace.terms.options.data_source import source_of
from headrace.terms.options.options import DEFAULT_ROWS_PER_STEP, DEFAULT_SEQUENCE_LENGTH
from headrace.terms.options.preferences import preferences_of
from headrace.terms.options.run_options import RunOptions

_Config = TypeVar("_Config", bound=RunOptions)


def read_model_config(model: Path) -> dict[str, Any]:
    """Return `config.json` of the model directory.

    Raises:
        ModelError: the directory or the file is missing, or the file is not a JSON object.
    """
    refuse_no_model(model)
    return read_configuration(model / "config.json")


class _NoTokenizer(ModelError, AttributeError):
    """Data that needs a tokenizer, and a model without one."""


class MissingTokenizer:
    """Stands for the tokenizer of a model that has none: enough for samples that are token ids already."""

    pad_token_id = 0

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise _NoTokenizer(self._reason)

    def save_pretrained(self, folder: str) -> tuple[str, ...]:
        """Write nothing."""
        return ()


def tokenizer_for_data(model: Path, chat_template: Path | None = None) -> Any:
    """Return the tokenizer of the model directory, with another `chat_template` if one is given; if there is none, something
    that refuses whatever is no token ids.

    Raises:
        ModelError: it cannot be read.
        ConfigError: the chat template cannot be read.
    """
    return open_tokenizer(model, chat_template) if has_tokenizer(model) else MissingTokenizer(_missing(model))


def _missing(model: Path) -> str:
    names = ", ".join(TOKENIZER_FILES)
    return f"{model}: the tokenizer is missing (none of {names}); copy the tokenizer files of the model there"


def open_tokenizer(model: Path, chat_template: Path | None = None) -> Any:
    """Return the tokenizer of the model directory, with another `chat_template` if one is given.

    Raises:
        ModelError: there is none, or it cannot be read.
        ConfigError: the chat template cannot be read.
    """
    if not has_tokenizer(model):
        raise ModelError(_missing(model))
    with refusing(f"{model}: the tokenizer cannot be read"):  # transformers raises whatever its parsers raise
        tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
        tokenizer(["a"], verbose=True)
        marks = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, mark in marks.items():
        if mark is not None and not isinstance(mark, int):
            raise ModelError(f"{model}: {name} is {shortened(repr(mark), 60)}; correct it in tokenizer_config.json")
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    template = tokenizer.chat_template
    named = list(template.values()) if isinstance(template, dict) else [] if template is None else [template]
    if not all(isinstance(each, str) for each in named):
        raise ModelError(
            f"{model}: chat_template is {shortened(repr(template), 60)}; expected a text, or texts by name: "
            "correct tokenizer_config.json"
        )
    return tokenizer


def read_chat_template(path: Path) -> str:
    """Return the chat template in a file, or in the configuration of a tokenizer.

    Raises:
        ConfigError: it cannot be read, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
        text = str(parse_json(text)["chat_template"]) if path.name == "tokenizer_config.json" else text
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"chat_template: {path} cannot be read ({why}); give a file with a template in Jinja") from error
    if not text.strip():
        raise ConfigError(f"chat_template: {path} is empty; give a file with a template in Jinja, or leave it out")
    return text


def with_lengths(config: _Config) -> _Config:
    """Return `config` with `sequence_length` and `tokens_per_step` decided. Raises as `lengths_of`."""
    return replace(config, **lengths_of(config.model, config.tokens_per_step, config.sequence_length))


def lengths_of(model: Path, tokens: int | None, length: int | None) -> dict[str, Any]:
    """Return `sequence_length` and `tokens_per_step` for a model; those that are given stay.

    Raises:
        ConfigError: `sequence_length` is more than the model has positions.
    """
    model_config = read_model_config(model)
    named = (model_config.get(name) for name in ("max_position_embeddings", "n_positions"))
    positions = next((number for number in named if type(number) is int and number > 0), None)
    if length is None:
        length = min(DEFAULT_SEQUENCE_LENGTH, positions or DEFAULT_SEQUENCE_LENGTH, tokens or DEFAULT_SEQUENCE_LENGTH)
    elif positions and length > positions:
        raise ConfigError(
            f"sequence_length: {length} is more than the {positions} positions of {model.name}; use at most that, or "
            "raise max_position_embeddings in its config.json if the model's positions may be stretched"
        )
    return {"sequence_length": length, "tokens_per_step": tokens or DEFAULT_ROWS_PER_STEP * length}


def open_tokens(config: RunOptions, tokenizer: Any, *, contents: bool = False) -> tuple[TokenSet, DataSpec]:
    """Return the tokenised samples and the data's specification. `config` has its lengths decided; `packing=None` means true.

    `contents`: see `DataSpec`.

    Raises:
        DataError: see `headrace.data.load_tokens`.
        ModelError: the tokenizer makes ids for which the model has no embedding.
    """
    spec = _spec(config, tokenizer, contents=contents)
    return _tokens(spec, tokenizer, config.model, config.cache), spec


def _tokens(spec: DataSpec, tokenizer: Any, model: Path, cache: Path) -> TokenSet:
    tokens = fitting(load_tokens(spec, tokenizer, cache), model)
    if spec.template_date is None:
        return tokens
    dated = f"the chat template asks for the date: it is {spec.template_date} (template_date)"
    return replace(tokens, notices=(dated, *tokens.notices))


def open_streamed(config: RunOptions, *, resumed: bool) -> StreamedBatches:
    """Return the batches of data that are read as they come (`streamed.py`). Raises as `open_tokens`."""
    tokenizer = tokenizer_for_data(config.model, config.chat_template)
    entries = tuple(replace(source_of(entry), streaming=True) for entry in config.data)
    spec = _spec(replace(config, data=entries), tokenizer)
    held_out, spec = _evaluated(config, spec, tokenizer, resumed=resumed) if config.eval_data else ([None], spec)
    sources = find_sources(entries, config.cache, spec.sequence_length)
    fit = partial(fitting, model=config.model)
    batches = StreamedBatches(sources, spec, tokenizer, buffer_rows=config.buffer_size, held_out=held_out[0], fit=fit)
    if not resumed:
        batches.first_rows(1)  # whatever is wrong with the first rows is found here
    return batches


def open_stream(config: RunOptions, *, resumed: bool = False) -> BatchStream:
    """Return the stream of a decided configuration, at its first row. A `resumed` run may have begun with tokens that were made
    by earlier rules. It keeps them if they are still in the cache.

    Raises:
        InputError: see `open_tokens`.
    """
    tokenizer = tokenizer_for_data(config.model, config.chat_template)
    spec = _spec(config, tokenizer)
    sets = _token_sets(spec, tokenizer, config.model, config.cache, resumed=resumed)
    if config.eval_split is not None:
        sets = [split_off(each, config.eval_split, config.seed, spec.samples_together) for each in sets]
    elif config.eval_data:
        held_out, spec = _evaluated(config, spec, tokenizer, resumed=resumed)
        by_rules = {each.info.version: each for each in reversed(held_out)}
        sets = [replace(each, held_out=by_rules.get(each.info.version, held_out[0])) for each in sets]
    return BatchStream(sets[0], spec, sets[1:])


def _evaluated(config: RunOptions, spec: DataSpec, tokenizer: Any, *, resumed: bool) -> tuple[list[TokenSet], DataSpec]:
    """Return the token sets of `eval_data`, and `spec` with the day that their template was told."""
    day = spec.template_date or config.template_date  # one day for both, also around midnight
    their = _spec(replace(config, data=config.eval_data, streaming=False, buffer_size=None, template_date=day), tokenizer)
    sets = _token_sets(their, tokenizer, config.model, config.cache, resumed=resumed)
    return sets, replace(spec, template_date=spec.template_date or their.template_date)


def _token_sets(spec: DataSpec, tokenizer: Any, model: Path, cache: Path, *, resumed: bool) -> list[TokenSet]:
    """Return the tokens of the data, and if the run is `resumed` also those that were made by earlier rules."""
    earlier = [fitting(each, model) for each in earlier_tokens(spec, tokenizer, cache)] if resumed else []
    try:
        tokens = _tokens(spec, tokenizer, model, cache)
    except DataError:
        if not earlier:
            raise
        tokens = earlier[0]  # today's rules refuse what the run began with
    return [tokens, *earlier]


def _spec(config: RunOptions, tokenizer: Any, *, contents: bool = False) -> DataSpec:
    if config.sequence_length is None or config.tokens_per_step is None:
        raise ConfigError("sequence_length and tokens_per_step are undecided; call with_lengths(config) first")
    spec = DataSpec(
        paths=config.data,
        sequence_length=config.sequence_length,
        tokens_per_step=config.tokens_per_step,
        seed=config.seed,
        packing=config.packing is not False,
        shuffle=config.shuffle,
        contents=contents,
        preferences=preferences_of(config.loss),
        border=border_of(config.border, config.loss),
    )
    day = config.template_date or date.today().isoformat()
    return replace(spec, template_date=day) if asks_for_date(spec, tokenizer, config.cache) else spec


def fitting(tokens: TokenSet, model: Path) -> TokenSet:
    """Return `tokens` for the vocabulary of a model.

    Raises:
        ModelError: it has no embedding for one of them.
    """
    vocabulary, largest = read_model_config(model).get("vocab_size"), tokens.info.largest_id
    if isinstance(vocabulary, int) and largest >= vocabulary:
        raise ModelError(
            f"{model}: the data has token {largest}, the model has embeddings for 0 to {vocabulary - 1} only; "
            "tokenizer (or input_ids) and model do not belong together"
        )
    if isinstance(vocabulary, int) and tokens.info.pad_id >= vocabulary:
        # A token that was added for padding, for which the model was never made larger. Padding is not trained, and trained
        # tokens do not see it, so any token will do.
        tokens = replace(tokens, info=replace(tokens.info, pad_id=0))
    return tokens


def total_steps(max_steps: int | None, epochs: float | None, stream: Batches) -> int:
    """Return the steps of the whole run: `max_steps` if given, else `epochs` (default 1) rounded up to whole steps.

    Raises:
        ConfigError: nobody knows how long an epoch is.
    """
    if max_steps is None and stream.steps_per_epoch is None:
        raise ConfigError("streaming: nobody knows how long the data are; give max_steps")
    return max_steps or max(1, math.ceil((epochs or 1.0) * (stream.steps_per_epoch or 0)))


def note_of_epochs(epochs: float | None, steps: int, stream: Batches) -> str:
    """Return a note where a step has more rows than an epoch, so that `epochs` hardly decides the `steps` of a run; else ""."""
    per_epoch = stream.steps_per_epoch
    if per_epoch is None or per_epoch >= 1:
        return ""
    asked, rows = epochs or 1.0, stream.spec.rows_per_step
    return (
        f"epochs: an epoch has {per_epoch * rows:g} of the {rows} rows of a step, so {asked:g} epoch{'s' * (asked != 1)} take "
        f"{steps} step{'s' * (steps > 1)}, which are {steps / per_epoch:.3g} epochs; a smaller tokens_per_step comes closer"
    )


def step_tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the arrays of `batch` as the tensors `Engine.step` takes, without copying."""
    arrays = {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "position_ids": batch.position_ids,
        "attention_mask": batch.attention_mask,
        "token_mask": batch.token_mask,
        "desirable": batch.desirable,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items() if array is not None}
