"""Rotary embeddings in GGUF files, which transformers' own reader passes over: stretched ones, and Llama 3's factors.

A file holds the factors by which Llama 3.1 divides frequencies, a configuration the numbers of its formula. A frequency of
wavelength w has s = (original / w - low) / (high - low), cut to 0..1. It is divided by 1 / ((1 - s) / factor + s).
Invariant: what is read makes the factors of the file, to float32 rounding, or the file is refused.
"""

from collections.abc import Mapping
from math import pi
from typing import Any

import numpy as np

FACTORS = "rope_freqs.weight"
_OTHER_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
_LOW, _HIGH = 1.0, 4.0  # the formula knows their ratio alone; so its authors chose them
_TOLERANCE = 1e-5


def llama3_factors(rotation: Mapping[str, Any], size: int) -> np.ndarray:
    """Return the factors, float32 (size / 2,), for `rope_parameters` of type llama3 and heads of which `size` numbers turn."""
    waves = 2 * pi * np.float64(rotation["rope_theta"]) ** (np.arange(0, size, 2) / size)
    low, high = rotation["low_freq_factor"], rotation["high_freq_factor"]
    smooth = np.clip((rotation["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    factors: np.ndarray = 1 / ((1 - smooth) / rotation["factor"] + smooth)
    return factors.astype(np.float32)


def rotation_of(factors: np.ndarray, theta: float) -> dict[str, Any] | None:
    """Return the `rope_parameters` of type llama3 which have these factors, or None if none have."""
    factors = factors.astype(np.float64).reshape(-1)
    largest, size = float(factors.max()), 2 * factors.size
    between = (factors > 1 + _TOLERANCE) & (factors < largest * (1 - _TOLERANCE))
    if not between.any() or largest <= 1:
        return None
    at = int(np.argmax(between))
    smooth = (1 / factors[at] - 1 / largest) / (1 - 1 / largest)
    original = (smooth * (_HIGH - _LOW) + _LOW) * 2 * pi * theta ** (2 * at / size)
    found = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": round(largest, 4),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": round(original),
    }
    return found if np.allclose(llama3_factors(found, size), factors, rtol=_TOLERANCE, atol=0) else None


def read_rotation(reader: Any, theta: float) -> dict[str, Any] | None:
    """Return the `rope_parameters` of an opened file where they are not the plain ones, else None.

    Raises:
        ValueError: frequencies are changed in a way that is not known; its text is a reason.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    scaling = f"{architecture}.rope.scaling"
    given = {name: reader.fields[f"{scaling}.{name}"].contents() for name in _names(reader, scaling)}
    kind = given.get("type", "none")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name in (FACTORS, *_OTHER_FACTORS)}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(given["factor"])}
    if kind != "none" or any(name in tensors for name in _OTHER_FACTORS):
        raise ValueError(f"its frequencies are changed by {kind if kind != 'none' else 'long and short factors'}")
    if FACTORS not in tensors or np.all(tensors[FACTORS] == 1):
        return None
    found = rotation_of(np.asarray(tensors[FACTORS]), theta)
    if found is None:
        raise ValueError(f"its {FACTORS} are not those of Llama 3")
    return found


def _names(reader: Any, scaling: str) -> list[str]:
    return [name.removeprefix(f"{scaling}.") for name in reader.fields if name.startswith(f"{scaling}.")]
