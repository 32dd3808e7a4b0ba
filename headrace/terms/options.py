"""The options of training, each declared once (`terms/declared.py` says how to add one).

`Options` is what an engine and a plan need; `RunOptions` is what a whole run needs besides. Either is carried whole, from the
command line or a program down to the record of the run. From here come the command line, README's table, and the record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.terms.adapter import adapter_of
from headrace.terms.budget import Budget
from headrace.terms.ceilings import Ceilings
from headrace.terms.contradictions import refuse_contradictions
from headrace.terms.declared import Declared, option
from headrace.terms.errors import ConfigError
from headrace.terms.named import named_text, parse_named
from headrace.terms.older_names import read_older_names
from headrace.terms.optimizer import ALL, MATRICES, ParameterGroup, Schedule
from headrace.terms.option_kinds import Either, Flag, Listed, Number, OneOf, Place, Rate, Record, Size, Text, Whole
from headrace.terms.summing import SEQUENTIAL, TREE

DEFAULT_SEQUENCE_LENGTH = 2048
DEFAULT_ROWS_PER_STEP = 8
_MOST_SEED = (1 << 128) - 1  # as many bits as numpy draws for one
# Other names for the dtypes of options.
DTYPE_NAMES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


@dataclass(frozen=True, kw_only=True)
class Options(Declared):
    """What an engine trains with, and a plan is made for. Values are taken as a YAML file has them: sizes such as "16GiB".
    Sizes are bytes, lengths and counts are tokens or steps. None stands for "choose for me".
    """

    output: str | Path | None = option(
        None,
        Place(),
        "Run directory; must not exist.",
        row="run directory; refused if it has anything in it",
        words="`runs/MODEL-DATA`",
        fixed=False,
    )
    ssd: str | Path | Sequence[str | Path] = option(
        (),
        Listed(Place()),
        "Directory on an SSD for the state; give several to stripe.",
        row="directories for the state; several are striped by their measured speed; a tenth of the free space stays free",
        words="run directory",
        plan=True,
        fixed=False,
    )
    host_memory: str | int | None = option(
        None,
        Size(),
        "Main memory the process may use, such as 16GiB.",
        row="bytes this process may use, Python and libraries included. By default control groups and resource limits count, "
        "page cache is free, and under WSL with a GPU it is half of memory at most",
        words="70 % of what this process may still take",
        plan=True,
    )
    device_memory: str | int | None = option(
        None,
        Size(),
        "GPU memory; without a GPU, a device tier of that size.",
        row="without a GPU, a value makes a separate device tier inside host memory (for tests)",
        words="90 % of what is free on the GPU",
        plan=True,
    )
    sequence_length: int | None = option(None, Whole(2), "Tokens of one row.", words="2048 or the model's limit", plan=True)
    tokens_per_step: int | None = option(
        None,
        Whole(),
        "Tokens of one optimizer step.",
        row="tokens of one optimizer step; costs SSD space for activations, and the hidden states of one block in memory",
        words="8 rows",
        plan=True,
    )
    max_steps: int | None = option(
        None,
        Whole(),
        "Steps of the run; wins over epochs.",
        row="length of the run; wins over `epochs`",
        words="by `epochs`",
        plan=True,
    )
    optimizer: str = option(
        "adamw",
        Text(),
        "The rule of updates, NAME or NAME:KEY=VALUE,KEY=VALUE.",
        row="the rule of updates and its settings: `NAME`, or `NAME:KEY=VALUE,KEY=VALUE` as in the table below; `adamw8bit` is "
        "`adamw:moments=int8`; fixed for a run",
        plan=True,
    )
    gradient: str = option(
        "dense",
        Text(),
        "How gradients travel, dense or lsp:KEY=VALUE,KEY=VALUE.",
        row="how gradients travel, and so what is trained: `dense`, all of it; or `lsp`, subspaces of the matrices of blocks "
        "(LSP-Offload), with settings as in the table below; fixed for a run",
        plan=True,
    )
    train: str = option(
        ALL,
        OneOf((ALL, MATRICES)),
        "all, or matrices: those of blocks alone.",
        row="`all` parameters, or the `matrices` of blocks: then embeddings, norms, biases and the head stay as they are, and "
        "do not count for clipping",
        plan=True,
    )
    adapter: str | None = option(
        None,
        Text(),
        "Train adapters beside frozen weights, lora:rank=16 or dora:rank=16.",
        row="train small matrices beside frozen ones, with settings as in the table below; `final/` then has "
        "peft's files; fixed for a run",
        words="none",
        plan=True,
    )
    learning_rate: float = option(1e-5, Number(), "Of the optimizer, after the warm-up.")
    weight_decay: float = option(
        0.0, Number(), "Not applied to norms and biases.", row="of the optimizer; norms and biases are not decayed"
    )
    adam_betas: Any = option(None, Listed(Number(), 2, 2), alias="optimizer: adamw:beta1=0.9,beta2=0.95", cli=False)
    adam_epsilon: Any = option(None, Number(), alias="optimizer: adamw:eps=1e-08", cli=False)
    moments: Any = option(None, Text(), alias="optimizer: adamw:moments=float32", plan=True)
    parameter_groups: tuple[ParameterGroup, ...] = option(
        (),
        Listed(Record(ParameterGroup)),
        "Parameters with a decay and a learning rate of their own.",
        row="list of `{pattern, weight_decay, learning_rate_scale}`, first match wins",
        cli=False,
    )
    warmup_steps: int = option(0, Whole(0), "Steps of linear rise of the learning rate.")
    lr_schedule: str = option(
        "constant", OneOf(Schedule.KINDS), "constant, linear or cosine.", row="`constant`, `linear` or `cosine`"
    )
    max_grad_norm: float | None = option(
        1.0,
        Number(),
        "Clip to this global norm; 0 for none.",
        row="exact global-norm clipping; 0 for none. Where clipping is rare, updates start before the norm is known, and a "
        "wrong guess is taken back: same bits",
        words="1.0",
        optional=True,
        plan=True,
    )
    compute_dtype: str = option(
        "bfloat16",
        OneOf(("bfloat16", "float32", "float16"), DTYPE_NAMES),
        "bfloat16, float32 or float16.",
        row="or `float32`, `float16` (dynamic loss scaling); the master weights are always fp32",
        plan=True,
    )
    gradient_dtype: str | None = option(
        None,
        OneOf(("bfloat16", "float32", "float16"), DTYPE_NAMES),
        "Dtype of drained gradients.",
        row="dtype of drained gradients; `float32` leaves them unrounded; micro-batches are summed in fp32 either way",
        words="`compute_dtype`; `float32` for adapters",
        cli=False,
    )
    gradient_sum: str = option(
        SEQUENTIAL,
        OneOf((SEQUENTIAL, TREE)),
        "sequential or tree.",
        row="how gradients of micro-batches are added: `tree` gives the same bits with any number of a node's workers under "
        "one `plan`; it takes more memory, and for tied weights one fp32 gradient of the embedding for each micro-batch",
    )
    seed: int = option(0, Whole(0, _MOST_SEED), "Order of the data and dropout.")
    checkpoint_every: int | None = option(
        None,
        Whole(),
        "Commit every so many steps.",
        row="commit only every so many steps; more than 1 pays only where states live in memory (`headrace plan` says how "
        "much). Where updates do not wait for the norm, every step is committed",
        words="1",
    )
    compile_blocks: bool = option(
        False,
        Flag(),
        "Run blocks under torch.compile.",
        row="run blocks under `torch.compile`: needs a C++ compiler (CPU) or Triton (GPU), and a model without dropout; "
        "nothing is replayed. The first step takes longer, and memory that no plan counts",
    )
    liger: bool = option(
        False,
        Flag(),
        "Liger's kernels in the blocks, on a GPU.",
        row="run Liger's norms, gated products and rotations in blocks, on a GPU with `liger-kernel`; nothing is replayed",
    )
    leave_out_blocks: bool = option(
        False,
        Flag(),
        "Train fewer blocks than have weights.",
        row="train only the blocks that `config.json` has, though the files hold weights of more blocks; those go into "
        "`final/` as they came. Without this option such a model is refused",
    )
    plan: str | Path | None = option(
        None,
        Place(),
        "Follow this plan: a run directory, or a plan as JSON.",
        row="the plan of another run (its directory), or a file with the output of `headrace plan --json`: the same plan, "
        "data and seed give the same bits, even if free memory has changed",
        words="the planner's",
        fixed=False,
    )
    machine: str | Ceilings | None = option(
        None,
        Either(Ceilings, Text()),
        "Machine profile: a name such as rtx4090-4ssd, or a file.",
        row="profile by which the plan is chosen: a name such as `rtx4090-4ssd`, or a file",
        words="what was measured, if anything",
        plan=True,
        fixed=False,
    )
    interpreter: str = option(
        "overlapped",
        OneOf(("overlapped", "plain")),
        "overlapped or plain.",
        row="`plain` runs one operation after the other: same bits, for tests",
        cli=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_grad_norm == 0:  # the two ways to say that nothing is clipped
            object.__setattr__(self, "max_grad_norm", None)
        length, tokens = self.sequence_length, self.tokens_per_step
        if length is not None and tokens is not None and tokens % length:
            nearest = max(1, round(tokens / length)) * length
            raise ConfigError(
                f"tokens_per_step: {tokens} is no multiple of sequence_length {length}; a step takes whole rows: use {nearest}"
            )
        if self.gradient_dtype not in (None, "float32", self.compute_dtype):
            raise ConfigError(
                f"gradient_dtype: {self.gradient_dtype!r} is neither float32 nor the compute dtype {self.compute_dtype}"
            )
        if self.adapter is not None:
            object.__setattr__(self, "adapter", adapter_of(self.adapter).text)
            object.__setattr__(self, "gradient_dtype", self.gradient_dtype or "float32")  # gradients of adapters are small
        refuse_contradictions(self)
        read_older_names(self)
        object.__setattr__(self, "gradient", named_text(*parse_named("gradient", self.gradient)))

    @property
    def budget(self) -> Budget:
        """The budget of each tier."""
        return Budget(device=self.device_memory, host=self.host_memory, ssd=self.ssd)

    @property
    def schedule(self) -> Schedule:
        """The learning rate over the run's `max_steps`."""
        return Schedule(self.lr_schedule, self.warmup_steps, self.max_steps or 0)

    @classmethod
    def fixed_keys(cls) -> tuple[str, ...]:
        """Return the keys of what a run goes on with as it began."""
        return tuple(each.key for each in Options.declarations() if each.fixed)

    def to_record(self) -> dict[str, Any]:
        """Return what `resume` needs besides the state, as plain JSON values: what is fixed, and the machine."""
        values = self.to_json()
        return {key: values[key] for key in (*self.fixed_keys(), "machine")}

    @staticmethod
    def from_record(values: Mapping[str, Any]) -> "Options":
        """Return the options of which `to_record`, or a version up to 0.1 with rule and schedule as objects, made `values`."""
        known = dict(values)
        if "model_dir" in known:
            del known["model_dir"]
            rule, schedule = known.pop("optimizer"), known.pop("schedule")
            known |= {
                "device_memory": known.pop("device_bytes"),
                "host_memory": known.pop("host_bytes"),
                "learning_rate": rule["lr"],
                "adam_betas": rule["betas"],
                "adam_epsilon": rule["eps"],
                "weight_decay": rule["weight_decay"],
                "parameter_groups": rule["groups"],
                "lr_schedule": schedule["kind"],
                "warmup_steps": schedule["warmup_steps"],
                "max_steps": schedule["total_steps"] or None,
            }
        return Options.of(known, source="the run's record")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """What `headrace plan` is asked besides: workers and a node, where states live on another machine than compute."""

    workers: int | None = option(
        None,
        Whole(1, 4096),
        "Workers that share a node; each is a --machine.",
        row="so many workers, each a `machine`, that hold nothing durable: weights and states live at a node",
        words="no node",
        plan=True,
    )
    link: str | float | None = option(
        None,
        Rate(),
        "Link of each worker and node, each way, such as 100Gbit.",
        row="what the link of each worker and of each node carries each way: `100Gbit`, `1.25GB`",
        words="10Gbit",
        plan=True,
    )
    node_ssds: int = option(12, Whole(1, 1024), "SSDs of each node.", plan=True)
    nodes: int = option(1, Whole(1, 1024), "Nodes, each with its part of every unit.", plan=True)
    node_machine: str | Ceilings = option(
        "luwu-node",
        Either(Ceilings, Text()),
        "Profile of a node: a name or a file.",
        row="profile of a node: a name, or a file; of its SSDs the first counts, `node_ssds` times",
        plan=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in self.declarations():
            if each.key in _OF_NODES and getattr(self, each.key) != each.default and self.workers is None:
                raise ConfigError(f"{each.key}: given without workers; say how many workers share a node, or leave it out")


_OF_NODES = ("link", "node_ssds", "nodes", "node_machine")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What `headrace train` runs with: an engine's options, and what is trained, for how long, and what is left at the end.

    The `config.yaml` of a run directory has what was chosen where an option is None.
    """

    model: Path = option(kind=Place(), help="Model directory.", row="model directory", cli=False)
    data: tuple[str, ...] = option(
        kind=Listed(Text(), 1), help="Files or directories.", row="one or more files or directories", cli=False
    )
    epochs: float | None = option(
        None, Number(0, 1e9, above=True), "Passes over the data.", row="length of the run in passes over the data", words="1"
    )
    packing: bool | None = option(
        None,
        Flag(),
        "Several samples in a row.",
        row="put several samples into one row; they do not see one another",
        words="where the model can",
    )
    shuffle: bool = option(True, Flag(), "Another order of the data in each pass.", cli=False)
    report_to: tuple[str, ...] = option(
        (),
        Listed(OneOf(("tensorboard", "trace"))),
        "tensorboard or trace; may be given twice.",
        row="`tensorboard`, `trace` (timeline for ui.perfetto.dev)",
    )
    measure: bool = option(
        True,
        Flag(),
        "Measure this machine before a long run, once.",
        row="measure this machine, if nobody has, before a run that is forecast to take over two minutes; it takes ten "
        "seconds at most, and is kept in `cache` for later runs",
    )
    keep_state: bool = option(
        False, Flag(), "Keep the state on the SSDs after the end.", row="keep the state on the SSDs after the end"
    )
    cache: Path = option(
        kind=Place(),
        help="Tokenised data.",
        row="directory of tokenised data, and of what was measured about this machine",
        words="`~/.cache/headrace`",
        cli=False,
        factory=lambda: Path.home() / ".cache" / "headrace",
    )


@dataclass(frozen=True, kw_only=True)
class NodeOptions(RunOptions):
    """What `headrace node` runs with: a run's options, and where workers come to. Budgets and SSDs are the node's own."""

    listen: str = option(
        "127.0.0.1:29500",
        Text(),
        "HOST:PORT for workers to connect to.",
        row="address for workers, HOST:PORT; any but 127.0.0.1 needs a `secret`",
        fixed=False,
    )
    workers: int = option(
        1, Whole(), "Workers to wait for.", row="workers that the run waits for; others wait joined, as spares", fixed=False
    )
    secret: Path | None = option(
        None,
        Place(),
        "File with the secret that workers must have too.",
        row="file with the secret that workers must have too",
        words="none",
        fixed=False,
    )
