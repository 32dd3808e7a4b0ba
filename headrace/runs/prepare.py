"""From the options as given to the options as decided, and their token stream.

Invariant: after `prepare` every choice is explicit and every path absolute, so `config.yaml` alone repeats the run.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.data.batches.batches import Batches
from headrace.data.batches.open_data import read_chat_template, total_steps, with_lengths
from headrace.data.batches.prompt_batches import PromptBatches
from headrace.files.model_directory import template_in
from headrace.plan.search.given import with_lengths_of_plan
from headrace.runs.open_rows import halved, open_rows
from headrace.runs.protocols import Engines
from headrace.runs.rewards import reward_of
from headrace.runs.rollouts import rewards_of
from headrace.store.run_directory import RunDirectory
from headrace.store.run_folders import check_directories
from headrace.terms.errors import ConfigError
from headrace.terms.events import Event
from headrace.terms.options.adapter import Lora, adapter_of
from headrace.terms.options.border import usual_border
from headrace.terms.options.contradictions import refuse_evaluation_of_nothing
from headrace.terms.options.data_source import DataSource, source_of
from headrace.terms.options.preferences import takes_rewards
from headrace.terms.options.run_options import NodeOptions, RunOptions
from headrace.update.combinations import refuse_combination
from headrace.update.wires.going_on import going_on

_NAME_BYTES = 143  # the longest name in an encrypted home directory; elsewhere 255 bytes are allowed


def check(config: RunOptions) -> tuple[RunOptions, RunDirectory]:
    """Return the options with lengths decided, and the (still untouched) run directory. It is quick: it only reads
    `config.json`.

    Raises:
        InputError: the run directory is taken, there is no model, an option does not suit it, or an SSD directory is unfit.
    """
    directory = RunDirectory(Path(config.output or default_output(config)).absolute())
    directory.check_new()
    refuse_evaluation_of_nothing(config)
    refuse_combination(config, at_node=isinstance(config, NodeOptions) and config.local_steps is None)
    config = _with_template_of_adapter(going_on(with_lengths(with_lengths_of_plan(config))))
    if ssd := config.budget.ssd:
        # The engine checks again, with the space that it needs; but nobody should tokenise for an hour to hear about a misspelt
        # path.
        check_directories(ssd, [0] * len(ssd), allow_in_memory=False, sink=_said_later)
    return config, directory


def _with_template_of_adapter(config: RunOptions) -> RunOptions:
    """Return options with the chat template beside the adapter that they go on from, unless one is given."""
    adapter = adapter_of(config.adapter) if config.adapter is not None else None
    if config.chat_template is not None or not isinstance(adapter, Lora) or adapter.from_ is None:
        return config
    own, base = (template_in(place) for place in (Path(adapter.from_), config.model))
    alike = own is None or (base is not None and read_chat_template(own) == read_chat_template(base))
    return config if alike else replace(config, chat_template=own)


def prepare(config: RunOptions, directory: RunDirectory, engines: Engines) -> tuple[RunOptions, Batches]:
    """Return the decided options and the stream at its first row.

    Raises:
        InputError: the model, the tokenizer, the data or an option cannot be used.
    """
    # Always asked: it looks at the architecture and the weight files, which is quicker than tokenising.
    reason = engines.why_not_packed(config.model, config.sequence_length or 0)
    if config.packing and reason:
        raise ConfigError(
            f"packing: {config.model.name} cannot keep several samples of one row of {config.sequence_length} tokens apart: "
            f"{reason}; leave packing out or set it to false"
        )
    packing = not reason and config.packing is not False and config.loss is None
    border = config.border or usual_border(config.loss)
    config = replace(config, packing=packing, border=border, output=directory.path, **_absolute_paths(config))
    for text in config.reward:
        reward_of(text)
    if takes_rewards(config.loss):
        config = halved(config)
    stream = open_rows(config)
    if isinstance(stream, PromptBatches):
        rewards_of(config, stream).close()  # also refuses what they take and nothing gives
    return replace(config, max_steps=total_steps(config, stream), template_date=stream.template_date), stream


def default_output(config: RunOptions) -> Path:
    """Return `runs/<model>-<data>`, cut to a name that every file system accepts."""
    name = os.fsencode(f"{config.model.absolute().name}-{Path(source_of(config.data[0]).path).stem}")
    return Path("runs") / (os.fsdecode(name) if len(name) <= _NAME_BYTES else name[:_NAME_BYTES].decode(errors="ignore"))


def _absolute_paths(config: RunOptions) -> dict[str, Any]:
    return {
        "model": config.model.absolute(),
        "data": tuple(map(absolute, config.data)),
        "eval_data": tuple(map(absolute, config.eval_data)),
        "ssd": tuple(path.absolute() for path in config.budget.ssd),
        "cache": config.cache.absolute(),
        "reward": tuple(map(_absolute_function, config.reward)),
        "chat_template": config.chat_template and config.chat_template.absolute(),
        "plan": config.plan and Path(config.plan).absolute(),
    }


def _absolute_function(text: str) -> str:
    path, colon, name = text.rpartition(":")
    return f"{Path(path).absolute()}{colon}{name}"


def absolute(entry: str | DataSource) -> str | DataSource:
    """Return an entry of the data with its path absolute. A name that is no path here may be a data set of the Hub."""
    if isinstance(entry, DataSource):
        return replace(entry, path=str(absolute(entry.path)))
    return str(Path(entry).absolute()) if Path(entry).exists() else entry


def _said_later(event: Event) -> None:
    """Drop the event: the engine's own check says the same when it makes the state."""
