"""From PEFT's LoraConfig to the engine's `adapter` option. Invariant: what the engine would not do is refused by name."""

from dataclasses import MISSING, fields
from typing import Any

from headrace.terms.errors import ConfigError
from headrace.terms.options.named import named_text

_TAKEN = {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "use_dora"}
# What says nothing of the numbers.
_NAMES = {"peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "runtime_config"}
_NAMES |= {"peft_version", "low_cpu_mem_usage"}


def with_adapters(skeleton: Any, config: Any) -> tuple[Any, str]:
    """Return PEFT's model around `skeleton`, and the adapter as the option `adapter` has it. Raises as `adapter_text`."""
    from peft import get_peft_model  # whoever has a LoraConfig has it

    targets = None
    if config.target_modules is None:
        from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

        targets = USUAL.get(getattr(skeleton.config, "model_type", ""))
    text = adapter_text(config, targets)  # before PEFT changes the configuration
    return get_peft_model(skeleton, config), text


def adapter_text(config: Any, targets: Any = None) -> str:
    """Return the adapter that a LoraConfig describes, as the option `adapter` has it. `targets` are PEFT's default ones.

    Raises:
        ConfigError: it is no LoraConfig, or asks for something that the engine does not do.
    """
    if type(config).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config: a LoraConfig is taken, found {type(config).__name__}; give one")
    for each in fields(config):
        usual = each.default_factory() if each.default_factory is not MISSING else each.default
        value = getattr(config, each.name)
        if each.name not in _TAKEN | _NAMES and value != usual:
            raise ConfigError(f"peft_config: {each.name}={value!r} is not done by the engine; leave it out")
    settings = {"rank": str(config.r), "alpha": repr(config.lora_alpha), "dropout": repr(config.lora_dropout)}
    for name, value in (("target_modules", config.target_modules or targets), ("exclude_modules", config.exclude_modules)):
        if isinstance(value, str) and value != "all-linear":
            raise ConfigError(f"peft_config: {name}={value!r} is a pattern; give a list of the ends of names")
        if value:
            settings[name] = value if isinstance(value, str) else "+".join(sorted(value))
    if config.use_dora:
        settings.pop("dropout") if not config.lora_dropout else None
    return named_text("dora" if config.use_dora else "lora", settings)
