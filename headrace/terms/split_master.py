"""The split master: an fp32 number as a bfloat16 `hi`, which compute reads, and a 16-bit remainder `lo`.

    bits of the master = (hi << 16) + lo, `hi` being the master rounded half away from zero, `lo` signed

The bits are 32-bit integers, signed or not, in arrays of NumPy and torch alike. They must be no NaN: rounding could carry one
into the sign.
The compiled loops have the same arithmetic in LLVM's language (`update.rules.kernels`).
"""

from typing import Any

QUIET_NAN_BITS = 0x7FC00000


def upper_half(bits: Any) -> Any:
    """Return `hi` in the lower 16 bits."""
    return (bits + 0x8000) >> 16


def lower_half(bits: Any, upper: Any) -> Any:
    """Return `lo`, which fits into 16 bits."""
    return bits - (upper << 16)


def joined(upper: Any, lower: Any) -> Any:
    """Return the bits of the master."""
    return (upper << 16) + lower
