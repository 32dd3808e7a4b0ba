"""The engine of generation: a model of any size answers prompts in passes over its weights.

Each micro-batch has a seat, which runs transformers' own `generate` (`model/seats`). A pass takes all seats through all blocks
(`verbs.py`). A finished seat makes way for the next micro-batch, which enters with its prompt while others decode.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from headrace.flow.run.execute import Interpreter, OverlappedInterpreter, PlainInterpreter
from headrace.flow.weights.expert_source import ExpertSource
from headrace.generate.passes.buffers import GenerationBuffers
from headrace.generate.passes.copying import Copying
from headrace.generate.passes.expert_flow import ExpertFlow
from headrace.generate.passes.measured import PromptProgress
from headrace.generate.passes.micro_batches import Generated, SeatRows, Together, generated_of, in_chunks, kept_copies, padded
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.planner import GenerationPlanner
from headrace.generate.passes.prompts_on_their_way import KeptPrompts
from headrace.generate.passes.seat_caches import CacheFile, SeatCache
from headrace.generate.passes.sources import source_of_plan
from headrace.generate.passes.units import GenerationUnits
from headrace.generate.passes.verbs import Pass, bind_residents, run_pass
from headrace.generate.plan.compose import composed
from headrace.generate.plan.plan import GenerationPlan
from headrace.generate.plan.schedule import build_pass
from headrace.generate.plan.seat_shapes import PromptLengths
from headrace.machine.host_memory import keep_freed_memory
from headrace.model.seats.generation_check import seat_taps
from headrace.model.seats.generation_keys import check_call, is_assisted, switched_off
from headrace.model.seats.seats import Seat, Seated, SeatTaps, parts_of_prompt, tokens_of_pass
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.closing import Closing
from headrace.terms.errors import ConfigError, PlanInfeasible, StepFailed
from headrace.terms.events import Event, GenerationPass, Sink
from headrace.terms.lanes import Lane
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.program import Program

_Item = TypeVar("_Item", bound=Together)
_Seated = TypeVar("_Seated", bound=Seated)

# At most so many programs are kept: the steady state repeats a few.
_MOST_PROGRAMS = 16


class Generator(Closing):
    """Generates with one model out of core. Use as a context manager, or `close` it."""

    def __init__(
        self,
        model: GenerationModel,
        planner: GenerationPlanner,
        interpreter: str,
        sink: Sink | None,
        copying: Copying | None = None,
    ) -> None:
        self.model, self.planner, self._copying = model, planner, copying
        self._sink, self._interpreter_name = sink, interpreter
        self.plan: GenerationPlan | None = None
        self._closers = contextlib.ExitStack()
        self._closers.callback(model.close)
        self._interpreter: Interpreter | None = None
        self._cache_file: CacheFile | None = None
        self._pass: Pass | None = None
        self._programs: dict[tuple[int, tuple[bool, int] | None, tuple[bool, ...], Snapshot], tuple[Program, Snapshot]] = {}
        self._left, self._number, self._prompts = Snapshot(), 0, PromptProgress()
        self.kept = KeptPrompts()
        keep_freed_memory(False)

    @classmethod
    def open(
        cls,
        model: str | Path,
        budget: Budget | None = None,
        *,
        options: GenerateOptions | None = None,
        interpreter: str = "overlapped",
        sink: Sink | None = None,
        opened: Callable[[Path, Budget, str | None, Sink | None], GenerationModel] | None = None,
        **changes: Any,
    ) -> "Generator":
        """Return the generator of a model directory. No weight is read yet.

        `options` are those of `headrace generate`; their prompts and sampling are not used here. `budget` and `changes`
        (`rows=4`, `compute_dtype="float32"`) win over them. `opened` opens a model that is no directory.

        Raises:
            InputError: the model cannot be read, or its architecture cannot generate block by block.
        """
        if budget is not None:
            changes |= {"host_memory": budget.host_bytes, "device_memory": budget.device_bytes, "ssd": budget.ssd}
        options = replace(options or GenerateOptions(), **changes)
        found = (opened or GenerationModel.of_directory)(Path(model), options.budget, options.compute_dtype, sink)
        planner = GenerationPlanner(found.chain, GenerationUnits.of(found.source, found.notes), found.machine, options)
        copying = Copying(options.budget.ssd, options.copy_weights, sink or _silent)
        return cls(found, planner, interpreter, sink, copying)

    def prepare(
        self, prompts: int, prompt_length: int, new_tokens: int, kept_copies: int = 0, lengths: PromptLengths | None = None
    ) -> GenerationPlan:
        """Return the plan for so many prompts, after allocating its buffers. An earlier plan is kept if its buffers are large
        enough.

        For `kept_copies` see the function of that name. With `lengths` more rows of short prompts go together.

        Raises:
            PlanInfeasible: a budget is too small; nothing has been allocated.
            ConfigError: the model has fewer positions.
        """
        self.model.check_positions(prompt_length, new_tokens)
        if self.plan is None or self._pass is None or not self.plan.holds(prompts, prompt_length, new_tokens, kept_copies):
            if self.plan is not None and self.plan.experts is not None:
                self._drop()  # planning needs memory for whole blocks
            plan = self.planner.plan(prompts, prompt_length, new_tokens, kept_copies, lengths=lengths)
            self.use(plan)
        assert self.plan is not None, "made above"
        return self.plan

    def plan_only(
        self,
        prompts: int,
        prompt_length: int,
        new_tokens: int,
        kept_copies: int = 0,
        **fixed: Any,
    ) -> GenerationPlan:
        """Return the plan for so many prompts, without allocating. `fixed` is as for a planner. Raises as `prepare` does."""
        self.model.check_positions(prompt_length, new_tokens)
        return self.planner.plan(prompts, prompt_length, new_tokens, kept_copies, **fixed)

    def prepare_at_least(
        self, prompts: int, prompt_length: int, new_tokens: int, tokens: int, kept_copies: int = 0
    ) -> GenerationPlan:
        """Do as `prepare`, for rows of at least `tokens` tokens, if the model has positions for them and they fit."""
        more = tokens - prompt_length - new_tokens
        if more > 0:
            with contextlib.suppress(ConfigError, PlanInfeasible):
                return self.prepare(prompts, prompt_length + more, new_tokens, kept_copies)
        return self.prepare(prompts, prompt_length, new_tokens, kept_copies)

    def use(self, plan: GenerationPlan) -> None:
        """Copy weights to the drives, if so decided. Then allocate the buffers of `plan`, and read the resident weights."""
        self._drop()
        model = self.model
        if self._copying is not None:
            self._copying.settle(model.source, plan)
        self._cache_file = CacheFile.make(plan, self.planner.directories, self._sink or _silent)
        self.plan, model.chain.narrow_products = plan, plan.narrow_rows > 0
        buffers = GenerationBuffers(plan, model.machine, self._sink or _silent)
        source = source_of_plan(self.model.source, plan)
        model.chain.lay_out(source.layouts, source.others)
        experts = None
        if plan.experts is not None and isinstance(source, ExpertSource):
            experts = ExpertFlow(plan.experts, model.chain, source, buffers, model.machine)
        self._pass = Pass(plan, model.chain, model.machine, source, buffers, experts=experts)
        bind_residents(self._pass)
        overlapped = self._interpreter_name == "overlapped"
        self._interpreter = (OverlappedInterpreter if overlapped else PlainInterpreter)(model.machine, self._sink)
        self._left, self._programs = Snapshot(), {}
        self.kept.use(plan, self.model, self.planner.directories)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        generation_config: Any = None,
        *,
        seed: int = 0,
        **settings: Any,
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield `(index, new tokens)` for prompts of token ids, as they are completed.

        `generation_config` and `settings` are those of transformers' `generate`; the default configuration is the model's. Each
        setting works as in transformers or is refused by name. With `num_return_sequences=n` each index comes n times, in
        order. Micro-batch k draws as after `torch.manual_seed(seed + k)`.

        Raises:
            ConfigError: a setting is refused, or the model has fewer positions.
            DataError: a prompt is empty, or has a token that the model has no embedding for.
        """
        lengths = [len(prompt) for prompt in prompts]
        for number, prompt in enumerate(prompts):
            self.model.check_tokens(prompt, f"prompt {number}")
        own = partial(self.model.settings, config=generation_config, changes=settings)
        check_call(own(max(lengths, default=1)), len(prompts))
        return self._generate(prompts, lengths, own, seed)

    def _generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], settings: Callable[[int], dict[str, Any]], seed: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        if not prompts:
            return
        whole = settings(max(lengths))
        config = whole["generation_config"]
        known = None if is_assisted(whole) else PromptLengths(tuple(lengths))
        plan = self.prepare(len(prompts), max(lengths), config.max_new_tokens, kept_copies(whole), known)
        rows = plan.rows if plan.shapes is None else plan.room
        batches = composed(lengths, [0] * len(prompts), 1 if is_assisted(whole) else rows)

        def batch(number: int, members: Sequence[int]) -> SeatRows:
            rows = tuple(tuple(prompts[index]) for index in members)
            return SeatRows(number, rows, seed + number, settings(max(map(len, rows))))

        for done in self.run([batch(number, members) for number, members in enumerate(batches)]):
            members = [index for index in batches[done.batch.number] for _ in range(config.num_return_sequences)]
            yield from zip(members, done.tokens, strict=True)

    def run(self, batches: Iterable[SeatRows | None], *, contain: bool = False) -> Iterator[Generated]:
        """Yield micro-batches as they are completed; they enter in order, as many together as planned. For None see `through`.

        With `contain` an error of one micro-batch's `generate` is its result, and ends no other.

        Raises:
            StepFailed: a lane failed.
            Whatever a seat's code raises, unless it is contained.
        """
        with seat_taps(self.model.chain.runner, self._seat_context) as taps:
            for batch, seat in self.through(batches, partial(self._sit, taps, contain)):
                yield generated_of(batch, seat.result, seat.cached_tokens)

    def through(self, items: Iterable[_Item | None], sit: Callable[[_Item], _Seated]) -> Iterator[tuple[_Item, _Seated]]:
        """Yield each item with its seat, once the seat is done; `sit` seats an item. Items enter in order, as many together as
        planned.

        Items may come while others are under way: None says that no more waits now, and is asked again before the next pass.

        Raises: as `run` does.
        """
        assert self._pass is not None, "prepared"
        assert self.plan is not None, "with a plan"
        waiting, live, caches = iter(items), dict[_Seated, _Item](), dict[_Seated, SeatCache]()
        with torch.no_grad():
            try:
                while True:
                    while len(live) < self.plan.seats and (item := next(waiting, None)) is not None:
                        seat = sit(item)
                        live[seat] = item
                        cached = seat.cached_tokens if isinstance(seat, Seat) else 0
                        self._prompts.enters(seat, item.length - cached if isinstance(item, SeatRows) else 0)
                        self._first_turn(seat)
                        if (found := self._cache_of(seat, item, caches.values())) is not None:
                            caches[seat] = found
                    if not live:
                        return
                    for seat in [each for each in live if each.done]:
                        caches.pop(seat, None)
                        self.kept.let_go(seat)
                        with contextlib.closing(seat):  # a run may have no end: what is done is kept no longer
                            yield live.pop(seat), seat
                    if live and not any(seat.done for seat in live):
                        self._run_pass(live, [caches.get(seat) for seat in live])
            finally:
                with contextlib.ExitStack() as seats:
                    for seat in live:
                        seats.callback(seat.close)
                        self.kept.let_go(seat)

    def close(self) -> None:
        """Free buffers and close the model's files."""
        self._drop()
        self.kept.close()
        self._closers.close()

    # -- passes -----------------------------------------------------------------------------------------------------

    def _cache_of(self, seat: Seated, item: Together, taken: Iterable[SeatCache]) -> SeatCache | None:
        """Return the parts of a seat's cache that are not where compute is; None where all of it stays."""
        assert self._pass is not None, "prepared"
        plan = self._pass.plan
        if not ((plan.caches.moves or plan.costs.coded) and isinstance(item, SeatRows) and isinstance(seat, Seat)):
            return None
        if seat.done or kept_copies(item.settings):
            return None
        place = min({*range(plan.seats)} - {cache.place for cache in taken})
        return SeatCache(seat, place, plan, self._pass.buffers.caches, self._cache_file, self.kept.of(seat))

    def _sit(self, taps: SeatTaps, contain: bool, batch: SeatRows) -> Seat:
        """Return the seat of a micro-batch, which begins behind what is kept of its prompt."""
        assert self.plan is not None, "prepared"
        apart = kept_copies(batch.settings) > 0 or batch.passed is not None
        prompt = None if apart or batch.owner is None else self.kept.begin(batch.owner, batch.rows[0])
        cached = prompt.cached_tokens if prompt is not None else 0
        together = batch.length - cached if self.plan.most_costs.chunks > 1 and not apart else 0
        cache = prompt.cache(self.model.chain.config, self.plan, self.model.machine.device) if prompt is not None else None
        seat = Seat(taps, self._call(batch, cache), batch.seed, contain=contain, together=together, passed=batch.passed)
        if prompt is not None:
            self.kept.enters(seat, prompt)
        return seat

    def _run_pass(self, live: Mapping[_Seated, _Item], caches: Sequence[SeatCache | None]) -> None:
        assert self._pass is not None, "prepared"
        assert self.plan is not None, "with a plan"
        assert self._interpreter is not None, "and an interpreter"
        seats, experts = list(live), self._pass.experts
        tokens = sum(seat.hidden.shape[0] * tokens_of_pass(seat) for seat in seats if seat.hidden is not None)
        chunks: dict[Seated, int] = {seat: len(parts_of_prompt(seat)) for seat in seats}
        if experts is not None:
            experts.begin_pass(tokens)
        attends = tuple(cache is not None and cache.attends for cache in caches)
        key = (len(seats), None if experts is None else experts.pass_key(tokens), attends, self._left)
        if key not in self._programs:
            if len(self._programs) == _MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = build_pass(self.plan, len(seats), self._left, tokens=tokens, attends=attends)
        program, self._left = self._programs[key]
        entering, begun = self._prompts.take(seats)
        start, weights, cached = time.perf_counter(), self.model.source.bytes_read, self._cache_bytes_read
        try:
            run_pass(
                program,
                replace(self._pass, seats=seats, caches=caches, prompts=self.kept.by_seat),
                self._interpreter,
                self._number,
            )
        except BaseException as failure:
            self._interpreter.fail(failure)
            raise
        if experts is not None:
            experts.loads.end_pass(idle=True)
        self.kept.after_pass(chunks)
        self._number += 1
        if self._sink is not None:
            self._sink(
                GenerationPass(
                    number=self._number,
                    seats=len(seats),
                    rows=sum(len(batch.rows) for batch in live.values()),
                    finished=0,
                    seconds=time.perf_counter() - start,
                    cache_bytes_read=(cached := self._cache_bytes_read - cached),
                    bytes_read=self.model.source.bytes_read - weights + cached,
                    entering=entering,
                    begun=begun,
                    **({} if experts is None else asdict(experts.loads.counts)),
                )
            )

    @property
    def _cache_bytes_read(self) -> int:
        """Bytes of caches that were read so far."""
        return self._cache_file.bytes_read if self._cache_file is not None else 0

    def _first_turn(self, seat: Seated) -> None:
        with self.model.machine.lane(Lane.COMPUTE), self.model.chain.arithmetic():
            seat.turn()

    def _seat_context(self) -> contextlib.AbstractContextManager[object]:
        stack = contextlib.ExitStack()
        stack.enter_context(self.model.machine.lane(Lane.COMPUTE))
        stack.enter_context(self.model.chain.arithmetic())
        return stack

    def _call(self, batch: SeatRows, cache: Any = None) -> Callable[[], Any]:
        check_call(batch.settings, len(batch.rows))
        ids, mask = padded(batch.rows, batch.settings["generation_config"].pad_token_id)
        device = self.model.machine.device
        inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
        assert self.plan is not None, "prepared"
        config = in_chunks(batch, self.plan.most_costs.prefill_chunk)
        settings = {**batch.settings, **switched_off(config), "generation_config": config}
        if cache is not None:
            settings["past_key_values"] = cache
        return lambda: self.model.chain.model.generate(**inputs, **settings)

    def _drop(self) -> None:
        if self._interpreter is not None:
            with contextlib.suppress(StepFailed):
                self._interpreter.wait()
            self._interpreter.close()
        if self._pass is not None:
            for unit in self._pass.plan.resident_units:
                self.model.chain.release(unit)
            if self._pass.experts is not None:
                self._pass.experts.close()
            if (in_codes := self.model.source.in_codes) is not None:
                in_codes.workspace.free()
            self.model.chain.lay_out(self.model.source.layouts)
            self.model.machine.release_host_buffers()
        if self._cache_file is not None:
            self._cache_file.close()
            self._cache_file = None
        self._interpreter = self._pass = None


def _silent(event: Event) -> None:
    """The sink of a generator that was given none."""
