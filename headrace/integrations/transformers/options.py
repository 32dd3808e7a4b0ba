"""From TrainingArguments to the options of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.data.batches.open_data import with_lengths
from headrace.files.hub import fetched_model, is_hub_name
from headrace.integrations.transformers.optimizers import schedule_of
from headrace.losses.router import SWITCH
from headrace.terms.errors import ConfigError
from headrace.terms.options.data_source import OF_PROGRAM
from headrace.terms.options.method_options import OF_MODEL
from headrace.terms.options.run_options import RunOptions

# What a run is planned with, beside `args`.
PLACEMENT = ("ssd", "host_memory", "device_memory", "machine", "plan", "cache", "sequence_length")


def model_directory(model: Any, say: Any) -> Path:
    """Return the directory of a model that is given by directory or name; one of the Hub is fetched.

    Raises:
        ConfigError: it is a model that is in memory.
        ModelError: it cannot be fetched.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model: HeadraceTrainer streams a model from its files; give its directory or name, not a {type(model).__name__}"
        )
    return fetched_model(str(model), say) if is_hub_name(model) else Path(model).expanduser().absolute()


def compute_dtype_of(args: Any, stored: str) -> str:
    """Return the dtype of forward and backward: that of bf16 or fp16, else the one in which the weights are stored."""
    return "bfloat16" if args.bf16 else "float16" if args.fp16 else stored


def router_coefficient_of(args: Any, config: Any) -> float | str | None:
    """Return the option `router_aux_loss_coef` for a model of `config`. SFTConfig of TRL adds the router's loss by the model's
    own coefficient; others where its configuration has switched that on, as transformers does: None.
    """
    if "router_aux_loss_coef" not in vars(args):
        return None
    coefficient: float | None = args.router_aux_loss_coef
    return (OF_MODEL if hasattr(config.get_text_config(), SWITCH) else None) if coefficient is None else coefficient


def run_options(
    model: Path, args: Any, placement: Mapping[str, Any], *, steps: int, rows: int, length: int, learned: Mapping[str, Any]
) -> RunOptions:
    """Return the options of a run of `steps` steps with `rows` rows of `length` tokens; `learned` are those of the update.

    Raises:
        ConfigError: an option cannot be used, or rows are longer than the model has positions.
    """
    schedule = schedule_of(args, steps)
    asked = {key: value for key, value in placement.items() if value is not None}
    values = {
        **{key: value for key, value in asked.items() if key != "sequence_length"},
        **learned,
        "model": model,
        "data": (f"{OF_PROGRAM}train_dataset",),
        "output": Path(args.output_dir).absolute(),
        "sequence_length": length,
        "tokens_per_step": rows * length,
        "max_steps": steps,
        "max_grad_norm": args.max_grad_norm,
        "lr_schedule": schedule.kind if schedule else "constant",
        "warmup_steps": schedule.warmup_steps if schedule else 0,
        "seed": args.seed,
        "compile_blocks": args.torch_compile,
        "liger": args.use_liger_kernel,
        "run_name": args.run_name or None,
        "packing": bool(getattr(args, "packing", False)),
        **_kept(args, steps),
    }
    options = RunOptions.of(values, source="HeadraceTrainer")
    absolute = {"ssd": tuple(path.absolute() for path in options.budget.ssd), "cache": options.cache.absolute()}
    return with_lengths(RunOptions.of({**options.to_json(), **absolute}, source="HeadraceTrainer"))


def _kept(args: Any, steps: int) -> dict[str, Any]:
    """Return which models the run keeps, as far as its plan asks for space."""
    strategy = getattr(args.save_strategy, "value", args.save_strategy)
    if strategy == "no":
        return {}
    every = args.save_steps if args.save_steps >= 1 else max(1, round(args.save_steps * steps))
    found = {"save_steps": int(every)} if strategy == "steps" else {"save_total_limit": args.save_total_limit or 1}
    return {**found, **({"save_total_limit": args.save_total_limit} if args.save_total_limit else {})}
