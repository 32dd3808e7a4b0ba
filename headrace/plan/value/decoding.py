"""What a plan counts for decoding coded weights."""

from headrace.codec.table import code_of_kind
from headrace.terms.coding import Decodes
from headrace.terms.machine.ceilings import Ceilings

# Bytes that the host's memory moves at least for a weight: its code comes, and two bytes go.
_LEAST_BYTES = 3


def making_like(decodes: Decodes, machine: Ceilings) -> int:
    """Return the bytes that are moved, at the rate of making weights, while a device, or the host, decodes `decodes`.

    A core decodes at the rates that the machine's profile has, where it has none at those of the table of codes.
    """
    if machine.has_device:
        return round(sum(weights * code_of_kind(kind).device_bytes_per_weight for kind, weights in decodes))
    return round(machine.make_bytes_per_second * sum(weights / _per_second(kind, machine) for kind, weights in decodes))


def _per_second(kind: str, machine: Ceilings) -> float:
    """Return the weights of a kind that the host decodes in a second; a kind that is not in the table is taken for FP8."""
    code, measured = code_of_kind(kind), machine.decoded_per_second
    of_core = measured.get(kind) or measured.get(code.kind) or code.decoded_per_second
    if not code.on_all_cores:
        return of_core
    return min(of_core * machine.cores, max(of_core, machine.make_bytes_per_second / _LEAST_BYTES))


def why_no_gain(kind: str, machine: Ceilings) -> str:
    """Return why reading plain bfloat16 is faster than decoding this kind, "" where it is not, or a device decodes."""
    if machine.has_device and not code_of_kind(kind).device_bytes_per_weight:
        return ""
    decoded, read = 2 * _per_second(kind, machine), machine.ssd_read_bytes_per_second
    if decoded > read:
        return ""
    return f"it is decoded at {decoded / 1e9:.3g} GB/s, and the drives read {read / 1e9:.3g} GB/s of plain weights"
