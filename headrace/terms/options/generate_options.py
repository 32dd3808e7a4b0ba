"""The options of generation, each declared once, as those of training are.

An option that sets something of transformers' GenerationConfig names it: `setting=Setting("min_p", samples=True)`. One that may
change while a job of a file is under way says `fixed=False`; all others decide its answers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.budget import Budget
from headrace.terms.options.declared import Declared, Group, Setting, option, option_as
from headrace.terms.options.option_kinds import Duration, Flag, Listed, Number, OneOf, PathOf, Text, Whole
from headrace.terms.options.options import Options
from headrace.terms.options.run_options import RunOptions

_prompts = partial(option, group=Group.PROMPTS)
_sampling = partial(option, group=Group.SAMPLING)
_method = partial(option, group=Group.METHOD)
_drafts = partial(option, group=Group.DRAFTS)
_memory = partial(option, group=Group.MEMORY)

_MOST_SEED = (1 << 63) - 1
# Where attention of new tokens is computed.
AUTO, ON_DEVICE, ON_HOST = "auto", "device", "host"
# In what keys and values may be kept, besides the dtype of activations (`codec.cache_codes`).
CACHE_DTYPES = ("int4", "int8")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Declared):
    """What `headrace generate` runs with. None stands for what generation_config.json says, or for what is planned."""

    prompt: str | None = _prompts(
        None,
        Text(),
        "Answer this text and end; - reads standard input.",
        row="text to answer; `-` reads standard input; without it, in a terminal: a conversation",
        words="-",
        often=True,
    )
    input: str | Path | None = _prompts(
        None,
        PathOf(),
        "Answer the lines of this JSONL file.",
        row="JSONL with a `prompt` (text) or `messages` in each line, or lines of OpenAI's Batch files",
        words="-",
        fixed=False,
        often=True,
    )
    output: str | Path | None = _prompts(
        None,
        PathOf(),
        "JSONL file that the answers go to.",
        row="JSONL of the answers, in the order of `input`",
        words="-",
        fixed=False,
        often=True,
    )
    max_new_tokens: int | None = _sampling(
        None, Whole(), "Most tokens of an answer.", words="the model's, or 512", often=True, setting=Setting("max_new_tokens")
    )
    temperature: float | None = _sampling(
        None,
        Number(),
        "Temperature of sampling; 0 is greedy.",
        row="of sampling; 0 takes the likeliest token each time",
        words="the model's",
        often=True,
        setting=Setting("temperature", samples=True),
    )
    top_p: float | None = _sampling(
        None,
        Number(0, 1, above=True),
        "Sample from the likeliest tokens that make up this share.",
        words="the model's",
        setting=Setting("top_p", samples=True),
    )
    top_k: int | None = _sampling(
        None, Whole(), "Sample from this many likeliest tokens.", words="the model's", setting=Setting("top_k", samples=True)
    )
    min_p: float | None = _sampling(
        None,
        Number(0, 1),
        "Sample from tokens of at least this share of the likeliest one's probability.",
        words="the model's",
        setting=Setting("min_p", samples=True),
    )
    repetition_penalty: float | None = _sampling(
        None,
        Number(0, above=True),
        "Divide scores of tokens that prompt or answer have by this.",
        row="divide scores above zero of tokens that prompt or answer have by this, and multiply others",
        words="the model's",
        setting=Setting("repetition_penalty"),
    )
    seed: int = _sampling(
        0,
        Whole(0, _MOST_SEED),
        "Seed of sampling.",
        row="seed of sampling: micro-batch k draws as after `torch.manual_seed(seed + k)`",
    )
    stop: tuple[str, ...] = _prompts(
        (), Listed(Text()), "End an answer before this text; repeatable.", setting=Setting("stop_strings")
    )
    system: str | None = _prompts(None, Text(), "System message of conversations.", words="the chat template's")
    raw: bool = _prompts(False, Flag(), "Take prompts as they are, without the chat template.")
    template_date: str | None = option_as(
        RunOptions,
        "template_date",
        row="the day, YYYY-MM-DD, for chat templates that ask for the date",
        words="a run's own, or now",
        group=Group.PROMPTS,
    )
    template_option: tuple[str, ...] = _prompts(
        (),
        Listed(Text()),
        "A variable of the chat template, KEY=VALUE; repeatable.",
        row="variables of the chat template, `KEY=VALUE`: `enable_thinking=false`. Values are JSON, or texts",
    )
    adapter: str | Path | None = _method(
        None,
        PathOf(),
        "Directory of a PEFT adapter (LoRA or DoRA), or of row tables, to apply.",
        row="directory of a PEFT adapter (LoRA or DoRA), or of row tables, to apply, such as `RUN_DIR/final`",
    )
    assistant: str | Path | None = _drafts(
        None,
        PathOf(),
        "Small model that drafts tokens (assisted decoding).",
        row="a small model with the same tokenizer that drafts several tokens for one pass over the weights. It stays in "
        "memory; one row at a time",
        words="-",
    )
    prompt_lookup: int | None = _drafts(
        None,
        Whole(),
        "Draft up to this many tokens out of the prompt.",
        row="draft up to this many tokens out of the prompt itself; one row at a time",
        words="-",
        setting=Setting("prompt_lookup_num_tokens", by_line=False),
    )
    host_memory: str | int | None = option_as(
        Options, "host_memory", row="", plan=True, fixed=False, group=Group.MEMORY, often=True
    )
    device_memory: str | int | None = option_as(
        Options, "device_memory", row="", plan=True, fixed=False, group=Group.MEMORY, often=True
    )
    ssd: str | Path | Sequence[str | Path] = _memory(
        (),
        Listed(PathOf()),
        "Directory on an SSD for keys, values and a copy of the weights; give it several times to stripe.",
        row="directories on SSDs for caches of keys and values, striped; without one caches stay in memory. Their files "
        "vanish at the end, even after a kill. A copy of the weights may lie there, too",
        words="-",
        plan=True,
        fixed=False,
    )
    copy_weights: bool | None = _memory(
        None,
        Flag(),
        "Copy the weights to the SSD directories, striped, and keep the copy.",
        row="copy the weights to the directories of `ssd` once, striped, and keep the copy for the next call",
        words="where passes get faster by it",
        fixed=False,
    )
    packed_products: bool | None = _method(
        None,
        Flag(),
        "Multiply few rows with weights in their codes.",
        row="multiply up to 8 rows with weights in their codes (int4, FP8, MXFP4, NF4, GGUF), which stay in place of "
        "decoded ones. Bits differ from those of decoded weights",
        words="where tokens come faster by it",
        fixed=False,
    )
    narrow_products: bool | None = _method(
        None,
        Flag(),
        "Multiply up to four rows of bfloat16 by a loop of Headrace's own.",
        row="multiply up to four rows of bfloat16 on the CPU by a loop of Headrace's own. Bits differ from those of torch's "
        "products",
        words="where it was measured to be faster",
        fixed=False,
    )
    attention: str = _method(
        AUTO,
        OneOf((AUTO, ON_DEVICE, ON_HOST)),
        "Where attention of new tokens is computed: auto, device or host.",
        row="where attention of new tokens is computed: `device`, or `host`, which then holds all keys and values that can "
        "move. With a GPU `auto` plans what is faster",
        plan=True,
        fixed=False,
    )
    cache_dtype: str | None = _method(
        None,
        OneOf(CACHE_DTYPES),
        "Keep keys and values in few bits, with loss: int4 or int8.",
        row="keep keys and values in few bits, with loss, wherever they lie: `int4` or `int8`. Answers change",
        words="that of activations",
        plan=True,
    )
    prefix_chunk: int | None = _method(
        None,
        Whole(),
        "Read prompts in chunks of this many tokens, from their first one.",
        row="read prompts in chunks of this many tokens, from their first one; bits are those of a server with that chunk",
        words="whole prompts, or as memory allows",
        plan=True,
    )
    compute_dtype: str | None = option_as(
        Options,
        "compute_dtype",
        default=None,
        row="",
        words="that of most weights",
        optional=True,
        plan=True,
        group=Group.METHOD,
        often=False,
        help="Dtype of activations: bfloat16, float32 or float16.",
    )
    rows: int | None = _memory(None, Whole(), "Number of rows in a micro-batch.", words="planned", plan=True)
    seats: int | None = _memory(
        None,
        Whole(1, 64),
        "Number of micro-batches that go through the model together.",
        words="planned",
        plan=True,
        fixed=False,
    )
    most_lost: float = option(
        1800.0,
        Duration(),
        "Most work that a kill may cost, such as 30m.",
        row="the most work that a kill may cost, such as `30m`; it bounds how many answers are computed at once",
        words="`30m`",
        fixed=False,
        group=Group.RUN,
    )
    machine: str | Ceilings | None = option_as(Options, "machine", plan=True, fixed=False, group=Group.MEMORY, often=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.input is not None:
            raise ConfigError("prompt and input: give a text or a file, not both")
        if (self.input is None) != (self.output is None):
            raise ConfigError("input and output: the answers of a file go into a file; give both, or neither")
        if self.assistant is not None and self.prompt_lookup is not None:
            raise ConfigError("assistant and prompt_lookup: both draft tokens; give one of them")
        if self.cache_dtype and (self.assistant is not None or self.prompt_lookup is not None):
            raise ConfigError(f"cache_dtype: {NO_COPIES}")
        if self.cache_dtype and self.attention == ON_HOST:
            raise ConfigError(
                f"cache_dtype and attention: the host reads keys and values in place, which {self.cache_dtype} does not allow; "
                "leave one of them out"
            )
        if self.copy_weights and not self.ssd:
            raise ConfigError(NO_PLACE)
        self.template_variables  # noqa: B018 (checked)
        if any(not text for text in self.stop):
            raise ConfigError("stop: expected a text that ends an answer, found an empty one; leave it out")

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template.

        Raises:
            ConfigError: one is not KEY=VALUE.
        """
        found: dict[str, Any] = {}
        for text in self.template_option:
            key, equals, value = text.partition("=")
            if not (key.isidentifier() and equals):
                raise ConfigError(f"template_option: expected KEY=VALUE, found {text!r}")
            try:
                found[key] = json.loads(value)
            except ValueError:
                found[key] = value
        return found

    @property
    def budget(self) -> Budget:
        """The budget of each tier."""
        return Budget(device=self.device_memory, host=self.host_memory, ssd=self.ssd)

    @property
    def settings(self) -> dict[str, Any]:
        """Those of transformers' generation settings that were given."""
        options = ((each.setting, getattr(self, each.key)) for each in self.declarations())
        given = {setting: value for setting, value in options if setting and value not in (None, ())}
        if any(setting.samples for setting in given):
            given[Setting("do_sample")] = True
        greedy = self.temperature == 0
        found = {
            setting.key: list(value) if isinstance(value, tuple) else value
            for setting, value in given.items()
            if not (greedy and setting.samples)
        }
        return found | GREEDY if greedy else found


NO_COPIES = "beams, several answers a row and drafts move or drop tokens of caches, which codes do not allow; leave it out"
NO_PLACE = "copy_weights: no drive is named to copy them to; give --ssd DIR, once for each"
# Greedy, with sampling's settings as if they were not set: transformers warns of those that have no effect.
GREEDY = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}
