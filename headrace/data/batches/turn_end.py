"""The end of a turn becomes an end-of-text token, so a model tuned on conversations stops where its answers end.

Chat templates end turns with marks that a base model's generation_config.json does not know. Where a run trained on
conversations, the model that it leaves has that mark among `eos_token_id`; adapters have the file beside them.
Invariant: nothing else in the file changes, and what names the mark already stays as it is.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.data.batches.open_data import open_tokenizer, read_chat_template, read_model_config
from headrace.data.chat.chat_template import Template
from headrace.data.pairs.preferences import is_conversation, read
from headrace.data.read.sources import find_sources
from headrace.files.model_directory import CHAT_TEMPLATE_NAME
from headrace.terms.errors import InputError
from headrace.terms.options.data_source import DataSource
from headrace.terms.options.preferences import preferences_of
from headrace.terms.options.run_options import RunOptions

_NAME = "generation_config.json"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def turn_end_file(
    config: RunOptions, out: Path | None = None, *, conversations: bool | None = None
) -> tuple[dict[str, str], str]:
    """Return, by their names, the files of a run's output `out` (None: of its model) that the run decides; and a note, or "".
    `conversations` says whether it trains on these (None: its data do).

    They are generation_config.json, if the token that ends turns is new in it, and the chat template, if the run has its own.
    """
    values, note = _with_turn_end(config, *([out] if out else []), conversations=conversations)
    files = {} if values is None else {_NAME: json.dumps(values, indent=2) + "\n"}
    if config.chat_template is not None:
        files[CHAT_TEMPLATE_NAME] = read_chat_template(config.chat_template)
    return files, note


def ends_of_run(config: RunOptions) -> tuple[Any, str]:
    """Return `eos_token_id` with which the unfinished run `config` is to answer, None for its model's own; and a note, or "".

    It is what `turn_end_file` will write when the run ends.
    """
    values, note = _with_turn_end(config)
    return (None if values is None else values["eos_token_id"]), note


def _with_turn_end(config: RunOptions, *beside: Path, conversations: bool | None = None) -> tuple[dict[str, Any] | None, str]:
    """Return the settings of generation with the token that ends turns, None where nothing changes; and a note, or ""."""
    try:
        if not (_is_of_conversations(config.data, config.cache, config.loss) if conversations is None else conversations):
            return None, ""
        tokenizer = open_tokenizer(config.model, config.chat_template)
        mark, token = turn_end(tokenizer)
        values = _values(config.model, *beside)
    except (InputError, OSError, ValueError) as error:
        return None, f"could not find out whether turns end with an end-of-text token: {error}"
    if token is None:
        return None, f"turns end with {mark!r}, which is no single token: no answer ends there by itself; give it as --stop"
    found = values.get("eos_token_id")
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if token in ends:
        return None, ""
    note = f"turns end with {mark!r}: token {token} is added to eos_token_id, so that answers end there"
    return {**values, "eos_token_id": [*ends, token] if ends else token}, note


def turn_end(tokenizer: Any) -> tuple[str, int | None]:
    """Return the mark with which the chat template ends a turn of the assistant, and its token; None if it is not one."""
    template = Template.of(tokenizer)
    end = (template.answer_end or "").strip()
    mark = max((each for each in template.marks if end.startswith(each)), key=len, default=end)
    ids = list(tokenizer([mark], add_special_tokens=False)["input_ids"][0]) if mark else []
    return mark, int(ids[0]) if len(ids) == 1 else None


def _is_of_conversations(data: Sequence[str | DataSource], cache: Path, loss: str | None) -> bool:
    taken = preferences_of(loss)
    opened = (read(source, taken) for source in find_sources(data, cache))
    return any(is_conversation(kind, next(rows), taken) for kind, rows in opened)


def _values(*places: Path) -> Mapping[str, Any]:
    """Return what generation_config.json has; where there is none, what transformers takes from config.json."""
    for path in (place / _NAME for place in reversed(places)):
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
    config = read_model_config(places[0])
    text = config.get("text_config") or {}
    known = {key: config.get(key, text.get(key)) for key in _TOKENS}
    return {key: value for key, value in known.items() if value is not None}
