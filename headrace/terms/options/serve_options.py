"""The options of `headrace serve`, each declared once; those of the model and of memory are as for `headrace generate`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.declared import Declared, Group, option, option_as
from headrace.terms.options.generate_options import NO_PLACE, GenerateOptions
from headrace.terms.options.option_kinds import Listed, OneOf, PathOf, Size, Text, Whole

_server = partial(option, group=Group.SERVER)

LOOPBACK = "127.0.0.1"
# How models call tools (`serve.tools.table`).
TOOL_DIALECTS = ("deepseek", "gemma", "glm", "harmony", "hermes", "llama3", "mistral", "mistral-args", "qwen", "think")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Declared):
    """What `headrace serve` runs with. None stands for what is planned or what the model says."""

    port: int = _server(8000, Whole(0, 65535), "Port to listen on; 0 takes a free one.", often=True)
    host: str = _server(
        LOOPBACK,
        Text(),
        "Address to listen on; any but a loopback address needs --api-key-file.",
        row="address to listen on; any but a loopback address needs `api_key_file`",
        often=True,
    )
    max_length: int | None = _server(
        None,
        Whole(8),
        "Most tokens of a prompt and its answer together.",
        row="most tokens of a prompt and its answer together; a prompt may take three quarters of them",
        words="4096, or what the model has positions for",
        often=True,
    )
    max_requests: int = _server(
        16, Whole(1, 4096), "Most requests at once, answered or waiting; more get status 429.", often=True
    )
    api_key_file: str | Path | None = _server(None, PathOf(), "File of keys, one a line; a request must bring one of them.")
    allowed_hosts: tuple[str, ...] = _server(
        (),
        Listed(Text()),
        "Names by which clients may call the server; * for all.",
        row="names by which clients may call the server, without the port; `*` for all",
        words="on a loopback address those of loopback, else all",
    )
    tool_dialect: str | None = _server(
        None,
        OneOf(TOOL_DIALECTS),
        f"How the model calls tools: {', '.join(TOOL_DIALECTS)}.",
        row="how the model calls tools ([dialects](serve.md#tools-and-thoughts)). Where its chat template does not tell of "
        "tools, a system message does",
        words="the tokenizer's `response_template`, or what the chat template's marks say",
    )
    prefix_chunk: int | None = option_as(
        GenerateOptions,
        "prefix_chunk",
        row="read prompts in chunks of this many tokens, from their first one; those of which prompts begin are kept",
        words="the first of 128, 256, 512 and 2048 that costs a long prompt at most a tenth more",
    )
    prefix_memory: int | None = _server(
        None,
        Size(or_none=True),
        "Host memory for beginnings of prompts that are kept, such as 8GiB; 0: none are.",
        row="host memory for beginnings of prompts that are kept; 0: none are, and prompts are read whole",
        words="what the plan leaves",
    )
    prefix_ssd: int | None = _server(
        None,
        Size(),
        "Room on the first --ssd directory for beginnings of prompts that leave memory, such as 50GiB.",
        row="room on the first directory of `ssd` for beginnings of prompts that leave memory; they outlive the server",
        words="none",
    )
    system: str | None = option_as(GenerateOptions, "system")
    template_option: tuple[str, ...] = option_as(GenerateOptions, "template_option")
    template_date: str | None = option_as(GenerateOptions, "template_date")
    adapter: str | Path | None = option_as(GenerateOptions, "adapter")
    host_memory: str | int | None = option_as(GenerateOptions, "host_memory")
    device_memory: str | int | None = option_as(GenerateOptions, "device_memory")
    ssd: tuple[Path, ...] = option_as(GenerateOptions, "ssd")
    copy_weights: bool | None = option_as(GenerateOptions, "copy_weights")
    packed_products: bool | None = option_as(GenerateOptions, "packed_products")
    narrow_products: bool | None = option_as(GenerateOptions, "narrow_products")
    attention: str = option_as(GenerateOptions, "attention")
    cache_dtype: str | None = option_as(GenerateOptions, "cache_dtype")
    compute_dtype: str | None = option_as(GenerateOptions, "compute_dtype")
    seats: int | None = option_as(
        GenerateOptions,
        "seats",
        help="Number of requests that go through the model together.",
        words="as many as `max_requests`, if memory and speed allow",
    )
    machine: str | Ceilings | None = option_as(GenerateOptions, "machine")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copy_weights and not self.ssd:
            raise ConfigError(NO_PLACE)
        if self.prefix_ssd and not self.ssd:
            raise ConfigError("prefix_ssd: no drive is named to keep beginnings of prompts on; give --ssd DIR")

    @property
    def generation(self) -> GenerateOptions:
        """The options of the generation behind the server: each request is a micro-batch of one row."""
        shared = set(GenerateOptions.keys()) & set(self.keys())
        return GenerateOptions(**{key: getattr(self, key) for key in shared}, rows=1)
