"""A machine to plan for if none was measured."""

from headrace.terms.machine.ceilings import NOMINAL, Ceilings

_MEMORY_BYTES_PER_SECOND = 30e9
# A core goes through so many bytes of bfloat16 weights as it multiplies one row. Python begins an operator in so many seconds
# on a processor. Both fit SmolLM2 and 1.35 B on two cores (docs/log/generation-forecast.md).
_ROW_BYTES_PER_SECOND_PER_CORE = 9e9
_OPERATOR_SECONDS = 1.5e-5


def nominal_machine(cores: int, *, host_bytes: int, device_bytes: int | None, widens: bool = False) -> Ceilings:
    """Return a machine of this size with modest figures in the usual proportions to one another.

    Only ratios matter to the choice. `headrace bench machine` measures the real ones. `widens`: its processor computes in
    float32 instead; plans then count what that takes for few rows themselves.
    """
    gpu = device_bytes is not None
    rate = 60e12 if gpu else 0.3e12 * cores
    of_row = None if gpu or widens else min(_MEMORY_BYTES_PER_SECOND, _ROW_BYTES_PER_SECOND_PER_CORE * cores)
    return Ceilings.from_json(
        {
            "name": NOMINAL,
            "has_device": gpu,
            "device_memory_bytes": device_bytes or 0,
            "host_memory_bytes": host_bytes,
            "cores": cores,
            "flops_per_second": {"bfloat16": rate, "float16": rate, "float32": rate / 4},
            "host_to_device_bytes_per_second": 12e9,
            "device_to_host_bytes_per_second": 12e9,
            "both_ways_bytes_per_second": 20e9,
            "host_memory_bytes_per_second": _MEMORY_BYTES_PER_SECOND,
            "row_product_bytes_per_second": of_row,
            "update_bytes_per_second": 25e9,
            "update_bytes_per_second_per_core": 20e9,
            "drives": [
                {
                    "read_bytes_per_second": 3e9,
                    "write_bytes_per_second": 2.5e9,
                    "mixed_bytes_per_second": 4e9,
                    "capacity_bytes": 1 << 40,
                }
            ],
            "fresh_pages_share": 1.0 if gpu else 0.8,
            "launch_seconds": 1e-4,
            "operator_seconds": 1e-5 if gpu else _OPERATOR_SECONDS,
            "turn_seconds": 2e-3,
            "transfer_seconds": 1e-4,
            "commit_seconds": 5e-3,
            "slowdowns": {},
            "sources": {},
        }
    )
