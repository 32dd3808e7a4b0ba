"""The question of a generation's plan, here or on another machine. All callers build it here."""

import gc
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypedDict, Unpack

import torch

from headrace.ask.place import RunPlace, runtime_here
from headrace.codec.cache_codes import CACHE_CODES
from headrace.files import default_ssd_bytes
from headrace.generate.passes.units import GenerationUnits
from headrace.generate.plan.block_tables import notes_on_tables
from headrace.generate.plan.peaks import with_peaks
from headrace.generate.plan.plan import FewRows, GenerationPlan
from headrace.generate.plan.prefix_plan import MOST_TIMES, PREFIX_CHUNKS, PrefixPlan, prefix_chunk_bytes
from headrace.generate.plan.search import FewRowProducts, GenerationQuestion, make_generation_plan
from headrace.generate.plan.seat_shapes import PromptLengths, SeatShapes
from headrace.generate.plan.seconds import with_forecast
from headrace.machine.protocol import Machine
from headrace.model import Chain
from headrace.model.kernels.narrow import NARROW_ROWS, has_kernel
from headrace.model.seats.generation_check import (
    why_not_attended,
    why_not_chunked,
    why_not_narrow,
    why_not_recomputed,
    why_not_tiered,
)
from headrace.model.seats.generation_costs import generation_costs
from headrace.model.seats.prefix_check import why_not_prefixed
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.clock.nominal import nominal_machine
from headrace.plan.value.allowance import Allowance
from headrace.terms.costs import GenerationCosts, in_one_pass
from headrace.terms.errors import ConfigError
from headrace.terms.machine.ceilings import Ceilings
from headrace.terms.options.generate_options import AUTO, NO_COPIES, ON_DEVICE, ON_HOST, GenerateOptions

# Tokens of a prompt that may go through the model together. Small chunks compute at lower rates, and read weights more often.
PREFILL_CHUNKS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What passes do. `costs` gives the costs of a seat, by rows and tokens. Up to `most_rows` are tried if no rows are asked
    for. Prompts may be taken in `chunks`.
    """

    costs: Callable[..., GenerationCosts] = generation_costs
    most_rows: int | None = None
    chunks: tuple[int, ...] = PREFILL_CHUNKS


class Fixed(TypedDict, total=False):
    """What is fixed of micro-batches, as by a job that goes on. Where `lengths` of prompts are known, and rows are not fixed,
    micro-batches of short prompts have more rows.
    """

    rows: int | None
    prefill_chunk: int | None
    few_rows: FewRows | None
    attention: str | None
    lengths: PromptLengths | None
    shapes: SeatShapes | None


class GenerationPlanner:
    """Plans generations of `chain`, which is ready for them, under `options`, on `machine`, or in a `RunPlace` elsewhere."""

    def __init__(
        self,
        chain: Chain,
        units: GenerationUnits,
        machine: Machine | RunPlace,
        options: GenerateOptions,
        passes: Passes | None = None,
    ) -> None:
        passes = passes or Passes()
        self._chain, self._units, self._machine, self._options = chain, units, machine, options
        self._ceilings = load_profile(options.machine) if isinstance(options.machine, str) else options.machine
        self._budget, self._chunks, self._most_rows = options.budget, passes.chunks, passes.most_rows
        self._code = CACHE_CODES.get(options.cache_dtype or "")
        self._costs = cache(partial(passes.costs, chain, **({"code": self._code} if self._code is not None else {})))
        self._kept: int | None = 0  # bytes for beginnings of prompts; None: what the plan leaves
        self._unkept, self._on_drive = "", 0
        self._has_drives = bool(self._budget.ssd) or (isinstance(machine, RunPlace) and machine.has_drives)

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories where caches may lie."""
        return self._budget.ssd

    def with_seats(self, seats: int) -> "GenerationPlanner":
        """Return a planner of the same for so many seats."""
        found = copy(self)
        found._options = replace(self._options, seats=seats)
        return found

    def keeping_prefixes(
        self, memory_bytes: int | None, ssd_bytes: int, prompt_length: int, new_tokens: int, kept_copies: int
    ) -> "GenerationPlanner":
        """Return a planner whose plans read prompts in chunks and keep these in so many bytes; None: in what plans leave.
        Those that leave memory go to a drive, with up to `ssd_bytes`.

        The chunk is the one that was asked for, or the smallest that costs hardly more for prompts of `prompt_length` tokens.

        Raises:
            ConfigError: a chunk was asked for, and prompts are not read in chunks.
            PlanInfeasible: a budget is too small.
        """
        found, asked = copy(self), self._options.prefix_chunk
        found._unkept = "" if memory_bytes == 0 else self._why_not_prefixed(kept_copies) or self._why_not_kept()
        if memory_bytes == 0 or found._unkept:
            return found
        found._kept, found._on_drive = memory_bytes, ssd_bytes
        if asked is None:
            plan = self.plan(1, prompt_length, new_tokens)
            chunk = next((each for each in PREFIX_CHUNKS if self._costs_little(each, plan)), PREFIX_CHUNKS[-1])
            found._options = replace(self._options, prefix_chunk=chunk)
        return found

    def _costs_little(self, chunk: int, whole: GenerationPlan) -> bool:
        """Return whether a prompt of full length takes hardly longer in such chunks than as in the plan `whole`."""
        costs = self._in_one_pass(self._costs(whole.rows, whole.prompt_length, chunk), chunk)
        chunked = with_forecast(replace(whole, costs=costs), self._ceilings or self._nominal(self._allowance(lambda: costs)))
        assert chunked.forecast is not None, "just made"
        assert whole.forecast is not None, "plans are made with one"
        return chunked.forecast.first_pass_seconds <= MOST_TIMES * whole.forecast.first_pass_seconds

    def _in_one_pass(self, costs: GenerationCosts, chunk: int) -> GenerationCosts:
        """Return the costs with all chunks of a prompt in one pass. Chunks of mixtures, whose experts may come one by one, take
        a pass each.
        """
        if not costs.prefill_chunk or self._units.experts is not None:
            return costs
        return in_one_pass(costs, self._costs(costs.rows, chunk).first)

    def _why_not_prefixed(self, kept_copies: int) -> str:
        if kept_copies:
            return "beams, several answers a row and drafts read prompts as a whole"
        return why_not_chunked(self._chain.config) or why_not_prefixed(self._chain.config)

    def _why_not_kept(self) -> str:
        moves = self._has_drives or self._code is not None or self._budget.device_bytes is not None
        return "experts may come one by one, and so may caches" if moves and self._units.experts is not None else ""

    def plan(
        self, prompts: int, prompt_length: int, new_tokens: int, kept_copies: int = 0, **fixed: Unpack[Fixed]
    ) -> GenerationPlan:
        """Return the plan for so many prompts of up to `prompt_length` tokens, with up to `new_tokens` for each.

        With `kept_copies` each row has so many caches, which stay where compute is; with 0 it has one, which may lie elsewhere.

        Raises:
            PlanInfeasible: a budget is too small.
            ConfigError: a budget is more than there is, or attention cannot be computed on the host, or prompts cannot be read
                in chunks, as asked.
            StorageError: an SSD directory cannot be written to.
        """
        reason = not_by_inputs = ""
        border = self._options.prefix_chunk
        if border and (why := self._why_not_prefixed(kept_copies)):
            raise ConfigError(f"prefix_chunk: prompts are not read in chunks here: {why}; leave it out")

        def costs_of(rows: int, *chunk: int, length: int = prompt_length) -> GenerationCosts:
            found: GenerationCosts = self._costs(rows * max(1, kept_copies), length, *chunk)
            if border and chunk == (border,):
                found = self._in_one_pass(found, border)
            found = replace(found, recomputing=None) if reason or not_by_inputs or border else found
            return replace(found, tiered=()) if reason else found

        allowance = self._allowance(lambda: costs_of(1))
        reason, not_by_inputs = self._why_caches_stay(costs_of(1), allowance, kept_copies)
        self._check_code(costs_of(1), kept_copies, reason)
        notes: list[str] = []
        places = self._places_of_attention(
            fixed.get("attention") or self._options.attention, allowance, costs_of(1), kept_copies, reason, notes
        )
        chunks, unchunked = self._chunks_of(0 if kept_copies else prompt_length)
        chunk, prefixes = fixed.get("prefill_chunk", border), self._prefixes(border, prompt_length)
        question = GenerationQuestion(
            units=self._units.figures,
            num_blocks=self._chain.num_blocks,
            compute_dtype=self._chain.compute_dtype,
            costs_of=costs_of,
            prompts=prompts,
            prompt_length=prompt_length,
            new_tokens=new_tokens,
            allowance=allowance,
            machine=self._ceilings or self._nominal(allowance),
            rows=self._options.rows or fixed.get("rows"),
            seats=self._options.seats,
            most_rows=self._most_rows,
            experts=self._units.experts,
            has_drives=self._has_drives,
            kept_copies=kept_copies,
            prefill_chunks=chunks if chunk is None else (chunk,),
            few_rows=self._few_rows(fixed.get("few_rows") or FewRows(), allowance, notes),
            attention=places,
            lengths=fixed.get("shapes") or (None if kept_copies else fixed.get("lengths")),
            prefixes=prefixes,
        )
        plan = self._with_prefixes(make_generation_plan(question), allowance)
        notes += _of_architecture(caches=reason, inputs=not_by_inputs, chunks=unchunked, prefixes=self._unkept)
        notes += self._notes_on_caches(kept_copies)
        return plan.with_notes((*self._units.notes, *self._chain.notes, *notes_on_tables(plan.costs), *notes))

    def _notes_on_caches(self, kept_copies: int) -> list[str]:
        notes = []
        if self._options.prefix_chunk and self._code is not None:
            notes.append(f"later chunks of a prompt see earlier ones in {self._code.name}")
        if kept_copies and self._has_drives:
            notes.append("beams and drafts exchange rows and take tokens back: caches stay in memory")
        return notes

    def _why_caches_stay(self, costs: GenerationCosts, allowance: Allowance, kept_copies: int) -> tuple[str, str]:
        """Return why caches stay where compute is, and why prompts are not kept as inputs; "" where they need not."""
        moves = self._code is not None or self._has_drives or allowance.device_bytes is not None
        if not moves or not any(costs.tiered) or kept_copies:
            return "", ""
        return why_not_tiered(self._chain.config), why_not_recomputed(self._chain.config) if costs.recomputing else ""

    def _few_rows(self, given: FewRows, allowance: Allowance, notes: list[str]) -> FewRowProducts:
        in_codes = self._units.in_codes
        return FewRowProducts(
            in_codes=self._options.packed_products if given.packed is None else given.packed,
            units=in_codes.figures if in_codes is not None else (),
            experts=in_codes.experts if in_codes is not None else None,
            narrow_rows=self._narrow_rows(given.narrow, allowance, notes),
        )

    def _prefixes(self, border: int | None, prompt_length: int) -> PrefixPlan | None:
        if not border or self._kept == 0:
            return None
        size = prefix_chunk_bytes(self._costs(1, prompt_length), border)
        return PrefixPlan(chunk=border, chunk_bytes=size, memory_bytes=self._kept or 0, ssd_bytes=self._on_drive)

    def _with_prefixes(self, plan: GenerationPlan, allowance: Allowance) -> GenerationPlan:
        """Return the plan with what it leaves for beginnings of prompts, where nobody said how much."""
        if plan.prefixes is None or self._kept is not None:
            return plan
        left = max(0, plan.results.allowed_bytes.get("host", 0) - plan.peak("host"))
        caches = replace(plan.caches, prefixes=replace(plan.prefixes, memory_bytes=left))
        return with_peaks(replace(plan, caches=caches), allowance)

    def _chunks_of(self, prompt_length: int) -> tuple[tuple[int, ...], str]:
        """Return the chunks of prompts that are tried, 0 for whole ones, and why not if it is the architecture."""
        chunks = [chunk for chunk in self._chunks if 2 * chunk <= prompt_length]
        unchunked = why_not_chunked(self._chain.config) if chunks else ""
        return (0, *([] if unchunked else chunks)), unchunked

    def _nominal(self, allowance: Allowance) -> Ceilings:
        return nominal_machine(
            allowance.cores,
            host_bytes=allowance.host_bytes,
            device_bytes=allowance.device_bytes,
            widens=self._chain.wide_products,
        )

    def _check_code(self, costs: GenerationCosts, kept_copies: int, not_tiered: str) -> None:
        """Refuse a code of caches that was asked for where it cannot be had.

        Raises:
            ConfigError: rows are exchanged, or this architecture has no caches that may be coded.
        """
        if self._code is not None and kept_copies:
            raise ConfigError(f"cache_dtype: {NO_COPIES}")
        if self._code is not None and not any(costs.tiered):
            why = not_tiered or "it has no caches of full attention"
            raise ConfigError(
                f"cache_dtype: caches of this architecture are not kept in {self._code.name}: {why}; leave it out"
            )

    def _narrow_rows(self, asked: bool | None, allowance: Allowance, notes: list[str]) -> int:
        """Return up to how many rows are multiplied by the loop for narrow products; add to `notes` why none are.

        Raises:
            ConfigError: it was asked for, and nothing here is computed in bfloat16 on a CPU.
        """
        asked = self._options.narrow_products if asked is None else asked
        can = self._chain.compute_dtype == "bfloat16" and not allowance.device_overhead_bytes
        if asked and not can:
            where = "a GPU" if allowance.device_overhead_bytes else "the CPU"
            found = f"here blocks are computed in {self._chain.compute_dtype} on {where}"
            raise ConfigError(f"narrow_products: asked for, but these are of bfloat16 on a CPU, and {found}; leave it out")
        if asked is False or not can or not (asked or has_kernel()):
            return 0
        if reason := why_not_narrow(self._chain.config):
            notes.append(f"products of few rows are torch's own in this architecture: {reason}")
            return 0
        return NARROW_ROWS

    def _places_of_attention(
        self,
        asked: str,
        allowance: Allowance,
        costs: GenerationCosts,
        kept_copies: int,
        not_tiered: str,
        notes: list[str],
    ) -> tuple[bool, ...]:
        """Return which of attending on the host and on the device are tried; add to `notes` why the host is not.

        Without being asked the host attends beside a GPU alone: on one processor nothing is gained by it that bits are worth.
        """
        separate, on_gpu = allowance.device_bytes is not None, allowance.device_overhead_bytes > 0
        if (
            self._code is not None
            or asked == ON_DEVICE
            or (asked == AUTO and not (on_gpu and costs.attends and not kept_copies))
        ):
            return (False,)
        if kept_copies:
            why = "beams, several answers a row and drafts keep their caches where compute is"
        elif not (separate or self._has_drives):
            why = "there is no device, so caches lie where compute is; give --device-memory or --ssd DIR"
        elif not_tiered or not any(costs.tiered):
            why = not_tiered or "this architecture has no caches that may lie elsewhere"
        else:
            why = why_not_attended(self._chain.config) or (
                "" if costs.attends else "not all of its attention can be asked there"
            )
        if not why:
            return (False, True) if asked == AUTO else (True,)
        if asked == ON_HOST:
            raise ConfigError(f"attention: host was asked for, but it cannot be computed there: {why}")
        notes.append(f"attention of this architecture is not computed on the host: {why}")
        return (False,)

    def _allowance(self, warm_up: Callable[[], object]) -> Allowance:
        ssd_bytes = default_ssd_bytes(self._ceilings, self._budget.ssd) if self._has_drives else None
        place = self._machine
        if not isinstance(place, RunPlace):
            warm_up()
            gc.collect()
            place = RunPlace.here(place, runtime_here(), torch.get_num_threads())
        place = place.keeping(self._chain, narrow=not self._chain.wide_products)
        return place.allowance(self._budget, ssd_bytes=ssd_bytes, import_workspace_bytes=None)


def _of_architecture(*, caches: str, inputs: str, chunks: str, prefixes: str) -> list[str]:
    """Return notes on what is not done with an architecture, for these reasons; "" where it is done."""
    lacking = {
        "caches of this architecture stay in memory": caches,
        "prompts of this architecture are not kept as inputs of blocks": inputs,
        "prompts of this architecture are not taken in chunks": chunks,
        "beginnings of prompts are not kept": prefixes,
    }
    return [f"{what}: {why}" for what, why in lacking.items() if why]
