"""Figures as words for people, and what people call dtypes."""

from collections.abc import Mapping

# Other names for the dtypes of options.
DTYPE_NAMES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
MOMENTS_NAMES: Mapping[str, str] = {"bf16": "bfloat16", "fp32": "float32", "8bit": "int8", "uint8": "int8"}


def plain_figure(value: float, digits: int = 3) -> str:
    """Return `value` in `digits` significant digits, or whole where that takes more; large ones never as powers of ten."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text
