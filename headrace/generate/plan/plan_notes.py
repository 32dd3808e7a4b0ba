"""What there is to say of a plan of generation beside its figures: codes that are not used, copies, more memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from headrace.codec.table import CODES
from headrace.files import on_drives_of
from headrace.generate.plan.plan import GenerationPlan
from headrace.plan.value.decoding import why_no_gain
from headrace.terms.errors import PlanInfeasible
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.sizes import format_bytes, format_seconds


def beside_plain(
    name: str | None, coded: GenerationPlan, plain: Callable[[], GenerationPlan], ceilings: Ceilings | None
) -> GenerationPlan:
    """Return the plan of coded weights with what plain ones would give, or the plain plan where `name` does not pay."""
    try:
        other = plain()
    except PlanInfeasible:
        return coded.with_notes((f"in plain {coded.compute_dtype} it would not fit",))
    why = _why_not(name, coded, other, ceilings)
    return other.with_notes((why,)) if why else replace(coded, uncoded=other.forecast)


def _why_not(name: str | None, coded: GenerationPlan, plain: GenerationPlan, ceilings: Ceilings | None) -> str:
    """Return why the lossless code `name`, which was asked for, is not planned: it would not be faster. "" where it is."""
    code = CODES.get(name or "")
    if code is None or not code.lossless or coded.forecast is None or plain.forecast is None:
        return ""
    now, then = plain.forecast.tokens_per_second, coded.forecast.tokens_per_second
    if then > now:
        return ""
    why = why_no_gain(code.kind, ceilings) if ceilings is not None and plain.forecast.read_bytes else ""
    reason = why or ("decoding takes more than it saves" if plain.forecast.read_bytes else "no weights are read in passes")
    return f"{code.name} is not used: {reason}. It would give {then:.3g} tokens/s, plain {plain.compute_dtype} {now:.3g}"


def of_copying(
    plan: GenerationPlan, options: GenerateOptions, ceilings: Ceilings | None, model: Path, *, here: bool
) -> tuple[str, ...]:
    """Return what there is to say of a copy of the weights on the drives, where passes read weights."""
    drives = () if here or ceilings is None else ceilings.drives
    directories = options.budget.ssd
    if plan.forecast is None or not plan.forecast.read_bytes or not (directories or len(drives) > 1):
        return ()
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else []
    if here and files and options.copy_weights is None and on_drives_of(files, directories):
        return ("weights are read from the model's files: the named drives have them already",)
    num_bytes = sum(map(plan.stored_bytes, range(len(plan.units))))
    where = _drives(len(directories) or len(drives)) + (", if these read faster," if here and not options.copy_weights else "")
    found = f"weights are copied to {where} once: {format_bytes(num_bytes)}"
    if ceilings is None:
        return (found,)
    seconds = num_bytes / ceilings.ssd_write_bytes_per_second + num_bytes / ceilings.ssd_read_bytes_per_second
    return (f"{found}, about {format_seconds(seconds)}",)


def _drives(count: int) -> str:
    return f"{count} drives, striped" if count > 1 else "a drive"
