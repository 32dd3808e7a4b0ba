"""After the run: planned against measured, in the same words for both.

Invariant: every tier that the plan names is shown, with the measurement or with a plain "not measured".
"""

from collections.abc import Mapping, Sequence

from headrace.report.metrics import Record
from headrace.report.progress import rate_words, traffic_words
from headrace.spec.sizes import format_bytes, format_seconds


def planned_and_measured(planned_peak_bytes: Mapping[str, int], records: Sequence[Record]) -> str:
    """Return a table of planned and measured peak bytes for each tier, then time and SSD traffic of a step.

    `records` are lines of `metrics.jsonl`; the median over steps stands for a step.
    """
    lines = []
    for tier, planned in planned_peak_bytes.items():
        measured = max((record["peak_bytes"].get(tier, 0) for record in records), default=0)
        found = f"measured {format_bytes(measured)}" if measured else "not measured"
        lines.append(f"{tier:<8} peak planned {format_bytes(planned)}, {found}")
    if records:
        middle = sorted(records, key=lambda record: float(record["seconds"]))[len(records) // 2]
        traffic = traffic_words(middle["bytes_read"].get("ssd", 0), middle["bytes_written"].get("ssd", 0))
        lines.append(
            f"step     {format_seconds(middle['seconds'])} (median), {rate_words(middle['tokens_per_second'])}, {traffic}"
        )
        skipped = sum("skipped" in record for record in records)
        lines.append(f"skipped  {skipped} of {len(records)} steps")
    return "\n".join(lines)
