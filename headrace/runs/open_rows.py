"""The rows that a run trains on: those of its data, or prompts that the model answers itself."""

from dataclasses import replace
from datetime import date

from headrace.data import DataSpec
from headrace.data.batches.batches import Batches
from headrace.data.batches.open_data import open_stream, open_streamed, open_tokenizer
from headrace.data.batches.prompt_batches import PromptBatches, read_prompts
from headrace.data.chat.chat_template import asks_for_time
from headrace.data.chat.prompts import Prompts
from headrace.losses import loss_of
from headrace.losses.grpo import Grpo
from headrace.machine.limits import available_memory_bytes
from headrace.terms.errors import ConfigError
from headrace.terms.options.budget import default_bytes
from headrace.terms.options.preferences import Preferences
from headrace.terms.options.run_options import RunOptions


def open_rows(config: RunOptions, *, resumed: bool = False) -> Batches:
    """Return the batches of a decided configuration: see `open_stream`, and `PromptBatches` for losses of rewards.

    Raises:
        InputError: the data, the tokenizer or an option cannot be used.
    """
    if isinstance(loss := loss_of(config.loss), Grpo):
        return _open_prompts(config, loss)
    return (open_streamed if config.streams else open_stream)(config, resumed=resumed)


def _open_prompts(config: RunOptions, loss: Grpo) -> PromptBatches:
    tokenizer = open_tokenizer(config.model, config.chat_template)
    assert config.sequence_length is not None, "it is decided"
    room = config.sequence_length - loss.max_completion_length
    if room < 1:
        raise ConfigError(
            f"sequence_length: {config.sequence_length} has no room for a prompt and max_completion_length="
            f"{loss.max_completion_length}; give more, or a shorter completion"
        )
    day = (config.template_date or date.today().isoformat()) if asks_for_time(tokenizer) else None
    prompts = Prompts(tokenizer, raw=True, day=day)  # as TRL: texts as they are, messages by the template
    found, too_long = read_prompts(config.data, config.cache, prompts, room)
    spec = DataSpec(
        paths=config.data,
        sequence_length=config.sequence_length,
        tokens_per_step=config.tokens_per_step or 0,
        seed=config.seed,
        packing=False,
        shuffle=config.shuffle,
        template_date=day,
        preferences=Preferences.PROMPTS,
    )
    return PromptBatches(found, spec, loss.num_generations, too_long)


def halved(config: RunOptions) -> RunOptions:
    """Return the options with half of the memory: a process that generates gets the other half."""
    budget = config.budget
    host = budget.host_bytes if budget.host_bytes is not None else default_bytes("host", available_memory_bytes())
    device = None if budget.device_bytes is None else budget.device_bytes // 2
    return replace(config, host_memory=host // 2, device_memory=device)
