"""What a plan counts for decoding coded weights."""

from headrace.codec.table import code_of_kind
from headrace.terms.ceilings import Ceilings
from headrace.terms.coding import Decodes


def making_like(decodes: Decodes, machine: Ceilings) -> int:
    """Return the bytes that are moved, at the rate of making weights, while a device, or a core, decodes `decodes`.

    A core decodes at the rates that the machine's profile has, where it has none at those of the table of codes.
    """
    if machine.has_device:
        return round(sum(weights * code_of_kind(kind).device_bytes_per_weight for kind, weights in decodes))
    return round(machine.make_bytes_per_second * sum(weights / _per_second(kind, machine) for kind, weights in decodes))


def _per_second(kind: str, machine: Ceilings) -> float:
    """Return the weights of a kind that a core decodes in a second; a kind that is not in the table is taken for FP8."""
    code, measured = code_of_kind(kind), machine.decoded_per_second
    return measured.get(kind) or measured.get(code.kind) or code.decoded_per_second
