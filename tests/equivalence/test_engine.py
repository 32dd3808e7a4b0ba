"""The engine trains like plain PyTorch, and where things are placed changes nothing: the same bits."""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, MODELS, ROWS, PlainTrainer, batch_of, check_close, packed, train
from plan_changes import changed
from safetensors.torch import load_file
from tiers import sampled
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.files import space
from headrace.model import Chain
from headrace.plan.clock.machine_profiles import load_profile
from headrace.store import StateStore, run_folders
from headrace.terms.errors import ConfigError, DiskFull, RunDirectoryError
from headrace.terms.events import Flushed, Notice, OpDone, StepResult
from headrace.terms.machine.drives import InFlight
from headrace.update import Checksums, Updater


def micro_batches(rows: int) -> dict[str, Any]:
    count = -(-ROWS // rows)
    sizes = {"micro_batch_sequences": rows, "num_micro_batches": count, "accumulate": count > 1}
    return {**sizes, "loss_chunk_tokens": LENGTH}  # in which losses are summed: a plan's may go by the budget


@pytest.mark.parametrize(
    ("name", "clip"),
    sampled(
        itertools.product([name for name in MODELS if "dropout" not in name], [None, 0.5]),
        [("llama-tied", 0.5), ("mixtral-aux", 0.5)],
    ),
)
def test_float32_training_is_plain_pytorch(
    name: str, clip: float | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir(name)
    plain = PlainTrainer(path, 1e-3, 0.1, clip)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(3)]
    losses, _ = train(
        path, tmp_path / "run", compute_dtype="float32", max_grad_norm=clip, export=tmp_path / "out", adjust=micro_batches(2)
    )
    assert losses == pytest.approx(expected, rel=2e-6)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        check_close(got, want, key)


def test_padded_batches_are_plain_pytorch(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    plain = PlainTrainer(path, 1e-3, 0.1, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed, padded=True))[0] for seed in range(3)]
    losses, _ = train(path, tmp_path / "run", compute_dtype="float32", padded=True, adjust=micro_batches(4))
    assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.deep
def test_auxiliary_losses_do_not_count_what_fills_packed_rows(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    lengths = (LENGTH, 13, 11, 6, LENGTH - 2)
    padded = batch_of(len(lengths), LENGTH, 0)
    mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
    padded |= {"labels": padded["labels"].where(mask, -100), "attention_mask": mask.long()}
    path = model_dir("mixtral-aux")
    loss, norm = PlainTrainer(path, 1e-3, 0.1, None).step(padded)
    for name, batch in {"padded": padded, "packed": packed(padded, lengths, ((0,), (1, 2), (3,), (4,)))}.items():
        options = {"output": tmp_path / name, "compute_dtype": "float32", "max_grad_norm": None}
        with Engine.open(path, headrace.Options(host_memory="4GiB", learning_rate=1e-3, **options)) as engine:
            result = engine.step(batch)
        assert result.loss == pytest.approx(loss, rel=2e-6), name
        assert result.grad_norm == pytest.approx(norm, rel=1e-5), name


PLACEMENTS: dict[str, dict[str, Any]] = {
    "plain": {"interpreter": "plain"},
    "two-slots": {"adjust": {"host_slots": 2, "prefetch": 1, "state_slots": 1, "gradient_slots": 1, "resident_states": ()}},
    "all-slots": {"adjust": {"host_slots": 4}},
    "stash-ssd": {"adjust": {"stash_tiers": ("ssd",) * 4, "stash_slots": 2}},
    "stash-mixed": {"adjust": {"stash_tiers": ("ssd", "device", "ssd", "device"), "stash_slots": 3}},
    "replay-all": {"adjust": {"kept": lambda plan: tuple(tuple(range(len(names))) for names in plan.stash.operators)}},
    "replay-some-ssd": {
        "adjust": {
            "kept": ((0, 3), (), (2,), (1, 4, 5)),
            "kept_bytes": (1 << 17,) * 4,
            "stash_tiers": ("ssd",) * 4,
            "stash_slots": 4,
        }
    },
    "recompute-all": {"adjust": {"skipped": ((),) * 4}},
    "device-tier": {"device_memory": "1GiB"},
    "device-tier-ssd": {
        "device_memory": "1GiB",
        "adjust": {
            "stash_tiers": ("host", "ssd", "ssd", "device"),
            "stash_slots": 2,
            "device_slots": 2,
            "host_slots": 2,
            "prefetch": 1,
        },
    },
    "device-tier-plain": {"device_memory": "1GiB", "interpreter": "plain"},
    "three-directories": {"directories": 3},
    "small-chunks": {"adjust": {"chunk_elements": 2048}},
    "gradients-on-ssd": {"adjust": {"held_gradients": "ssd", "resident_states": ()}},
    "late": {"adjust": {"update_policy": "immediate", "late_units": (0, 2), "resident_states": ()}},
    "late-on-ssd": {
        "adjust": {
            "update_policy": "immediate",
            "late_units": (1, 3, 4),
            "held_gradients": "ssd",
            "resident_states": (),
            "host_slots": 2,
            "prefetch": 1,
        }
    },
    "late-device-tier": {
        "device_memory": "1GiB",
        "adjust": {"update_policy": "immediate", "late_units": (1, 2), "resident_states": ()},
    },
    "speculative": {"adjust": {"update_policy": "speculative", "late_units": (), "resident_states": ()}},
    "speculative-late": {
        "adjust": {"update_policy": "speculative", "late_units": (0, 2), "resident_states": (), "host_slots": 3, "prefetch": 1}
    },
    "speculative-ssd": {
        "device_memory": "1GiB",
        "adjust": {"update_policy": "speculative", "late_units": (2,), "held_gradients": "ssd", "resident_states": ()},
    },
    "device-updates": {"device_memory": "1GiB", "adjust": {"device_update_every": 1}},
    "device-updates-plain": {
        "device_memory": "1GiB",
        "adjust": {"device_update_every": 2, "chunk_elements": 2048},
        "interpreter": "plain",
    },
    "late-device-updates": {
        "device_memory": "1GiB",
        "adjust": {
            "update_policy": "immediate",
            "device_update_every": 3,
            "chunk_elements": 4096,
            "late_units": (0, 2),
            "resident_states": (),
        },
    },
    "speculative-device-updates": {
        "device_memory": "1GiB",
        "adjust": {
            "device_update_every": 2,
            "chunk_elements": 4096,
            "state_slots": 2,
            "update_policy": "speculative",
            "late_units": (2,),
            "resident_states": (),
        },
    },
    "states-in-memory-device-updates": {
        "device_memory": "1GiB",
        "adjust": {"device_update_every": 2, "resident_states": lambda plan: tuple(range(len(plan.units)))},
    },
    "states-in-memory": {"adjust": {"resident_states": lambda plan: tuple(range(len(plan.units)))}},
    "waiting-in-memory": {
        "adjust": {
            "update_policy": "deferred",
            "late_units": lambda plan: tuple(range(len(plan.units))),
            "resident_states": lambda plan: tuple(range(len(plan.units))),
        }
    },
    "every-second-step": {"checkpoint_every": 2},
}


PLACED = ("llama", "llama-tied", "gpt2-dropout", "mamba2")


def possible(placement: str, clip: float | None) -> bool:
    """With immediate updates states stay on the SSD, as a step back must be possible; deferred means that all are late."""
    return not placement.startswith("late") if clip else "states" not in placement


@pytest.mark.parametrize("every", [pytest.param(False, id="some"), pytest.param(True, id="all", marks=pytest.mark.deep)])
@pytest.mark.parametrize(
    ("name", "clip"),
    sampled(itertools.product(PLACED, (None, 0.5)), [("llama-tied", 0.5)]),
)
def test_placement_changes_nothing(
    name: str, clip: float | None, every: bool, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Each placement with one of the models and one policy; with all of them in `make deep`."""
    path = model_dir(name, "bfloat16")
    blocks = 3 if "gpt2" in name else 4
    base = train(path, tmp_path / "base", max_grad_norm=clip, adjust=micro_batches(2))
    for number, (placement, options) in enumerate(PLACEMENTS.items()):
        cases = [case for case in itertools.product(PLACED, (None, 0.5)) if possible(placement, case[1])]
        chosen = cases if every else cases[number % len(cases) :][:1]
        if (name, clip) not in chosen and (name, clip, placement) != ("llama-tied", 0.5, "speculative-device-updates"):
            continue
        options = {key: dict(value) if isinstance(value, dict) else value for key, value in options.items()}
        changes = {**micro_batches(2), **options.pop("adjust", {})}
        changes = {
            key: value[:blocks]
            if isinstance(value, tuple) and key in ("stash_tiers", "kept", "kept_bytes", "skipped")
            else value
            for key, value in changes.items()
        }
        folders = [tmp_path / f"ssd{number}-{index}" for index in range(options.pop("directories", 1))]
        for folder in folders:
            folder.mkdir()
        got = train(path, tmp_path / f"run{number}", max_grad_norm=clip, adjust=changes, ssd=folders, **options)
        assert got[0] == base[0], f"{placement}: losses differ"
        for key, want in base[1].items():
            assert torch.equal(got[1][key], want), f"{placement}: {key} differs"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("compute_dtype", "gradient_dtype"),
    sampled([("bfloat16", "float32"), ("float32", None), ("float16", None)], [("bfloat16", "float32")]),
)
def test_each_kth_chunk_is_updated_on_the_device_with_the_same_bits(
    compute_dtype: str, gradient_dtype: str | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    lanes: dict[int, list[str]] = {0: [], 3: []}
    results, steps = {}, 4
    for every, seen in lanes.items():

        def sink(event: object, seen: list[str] = seen) -> None:
            if isinstance(event, OpDone) and event.verb == "update":
                seen.append(event.lane)

        results[every] = train(
            model_dir("llama"),
            tmp_path / f"every{every}",
            steps=steps,
            adjust={**micro_batches(3), "device_update_every": every, "chunk_elements": 4096, "state_slots": 2},
            device_memory="1GiB",
            compute_dtype=compute_dtype,
            gradient_dtype=gradient_dtype,
            sink=sink,
        )
    assert set(lanes[0]) == {"update"}
    assert len(lanes[3]) == len(lanes[0])
    chunks = len(lanes[3]) // steps
    assert lanes[3].count("device-update") == steps * (chunks // 3) > 0
    assert results[3][0] == results[0][0]
    for key, want in results[0][1].items():
        assert torch.equal(results[3][1][key], want), f"{key} differs"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("tier", "held"),
    sampled(
        itertools.product(["ssd", "host", "device"], ["host", "ssd"]), [("ssd", "host"), ("host", "ssd"), ("device", "ssd")]
    ),
)
def test_more_rows_than_planned_are_plain_pytorch(tier: str, held: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Shorter rows: as many tokens as planned or fewer, and what each micro-batch leaves has its own place all the same."""
    path = model_dir("llama")
    plain = PlainTrainer(path, 1e-3, 0.1, 0.5)
    placed = {"stash_tiers": (tier,) * 4, "stash_slots": 3 if tier == "ssd" else 0, "held_gradients": held}

    def adjust_plan(plan: Any) -> Any:
        rows = {
            "micro_batch_sequences": 2,
            "num_micro_batches": -(-plan.batch.tokens_per_step // plan.batch.sequence_length // 2),
        }
        return changed(plan.with_results(speculation=None), update_policy="deferred", resident_states=(), **rows, **placed)

    planned = []
    with Engine.open(
        path,
        headrace.Options(
            host_memory="4GiB",
            device_memory="1GiB" if tier == "host" else None,
            learning_rate=1e-3,
            weight_decay=0.1,
            output=tmp_path / "run",
            compute_dtype="float32",
            max_grad_norm=0.5,
            tokens_per_step=4 * LENGTH,
            sequence_length=LENGTH,
        ),
        adjust_plan=adjust_plan,
    ) as engine:
        for seed, (rows, length) in enumerate(
            [(4, LENGTH), (8, LENGTH // 2), (5, LENGTH * 3 // 4), (1, LENGTH), (5, LENGTH - 1)]
        ):
            batch = batch_of(rows, length, seed)
            loss, norm = plain.step(batch)
            result = engine.step(batch)
            assert (result.loss, result.grad_norm) == (pytest.approx(loss, rel=2e-6), pytest.approx(norm, rel=1e-4)), seed
            assert engine.plan is not None
            planned.append(engine.plan.batch.tokens_per_step // LENGTH)
    assert planned == [4, 4, 5, 5, 5]


def everything(plan: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(len(names))) for names in plan.stash.operators)


@pytest.mark.parametrize(
    ("adjust", "blocks"),
    sampled(
        [
            ({"kept": everything}, 0),
            ({"kept": everything, "operators": lambda plan: (*plan.stash.operators[:3], plan.stash.operators[3][:-1])}, 1),
            ({"kept": everything, "stash_tiers": ("ssd",) * 4, "stash_slots": 4, "kept_bytes": (1 << 20, 64, 64, 1 << 20)}, 2),
        ]
    ),
    ids=["as-planned", "other-operators", "more-than-planned"],
)
def test_blocks_that_cannot_be_replayed_are_recomputed_and_named_once(
    adjust: dict[str, Any], blocks: int, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama")
    expected, _ = train(path, tmp_path / "recompute", steps=2, adjust={"kept": ((),) * 4, "skipped": ((),) * 4})
    events: list[Any] = []
    losses, _ = train(path, tmp_path / "run", steps=2, adjust=adjust, sink=events.append)
    assert losses == expected
    said = [event.text for event in events if isinstance(event, Notice) and event.text.startswith("replay")]
    assert [text.split()[1:4] for text in said] == ([[str(blocks), "of", "4"]] if blocks else [])


@pytest.mark.parametrize(
    ("planned", "freed", "expected"),
    sampled(
        [(1, "kept", True), (1, "returned", True), (1 << 40, "kept", False), (1 << 40, "returned", False)],
        [(1, "kept", True), (1 << 40, "returned", False)],
    ),
)
def test_pieces_that_come_near_the_planned_peak_are_given_back_during_steps(
    planned: int,
    freed: str,
    expected: bool,
    model_dir: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    returned: list[None] = []
    # What is alive cannot be given back: it is tried again and again.
    monkeypatch.setattr("headrace.machine.host_memory._LOOKS_BETWEEN", 1)
    monkeypatch.setattr("headrace.machine.host_memory.return_pieces", lambda: returned.append(None))
    adjust = {"freed_memory": freed, "peak_bytes": {"host": {"all": planned}, "ssd": {}}}
    train(model_dir("llama"), tmp_path / "run", steps=4, adjust=adjust)
    assert (len(returned) > 10) == expected, len(returned)  # opening and closing give back, too


def test_threads_are_the_plans_while_it_runs(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, in_compute, of_updates = torch.get_num_threads(), set(), set()
    block, update_range = Chain.block, Updater.update_range

    def watched_block(*arguments: Any) -> Any:
        if not any(isinstance(value, FakeTensor) for value in arguments):  # the planner's, on shapes alone
            in_compute.add(torch.get_num_threads())
        return block(*arguments)

    def watched_update(updater: Updater, *arguments: Any, **options: Any) -> Checksums | None:
        of_updates.add(updater.threads)
        return update_range(updater, *arguments, **options)

    monkeypatch.setattr(Chain, "block", watched_block)
    monkeypatch.setattr(Updater, "update_range", watched_update)
    torch.set_num_threads(3)
    try:
        train(model_dir("llama"), tmp_path / "run", steps=1, adjust={"compute_threads": 1, "update_threads": 2})
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert (in_compute, of_updates) == ({1}, {2})


@pytest.mark.wide
@pytest.mark.parametrize("rows", sampled([1, 2, 3, 4, 6], [1, 4]))
def test_any_split_gives_the_same_loss(rows: int, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Token-weighted: rows with few trained tokens weigh less, whatever micro-batch they fall in."""
    path = model_dir("mixtral-aux")
    plain = PlainTrainer(path, 1e-3, 0.1, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed))[0] for seed in range(2)]
    losses, _ = train(path, tmp_path / "run", steps=2, compute_dtype="float32", adjust=micro_batches(rows))
    assert losses == pytest.approx(expected, rel=2e-6)


@pytest.mark.deep
def test_bfloat16_follows_a_float32_master(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """A hundred steps of bf16 compute end near where float32 training ends: the master keeps what bf16 would lose."""
    path = model_dir("llama", "bfloat16")
    plain = PlainTrainer(path, 1e-3, 0.1, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed % 4))[0] for seed in range(100)]
    with Engine.open(
        path,
        headrace.Options(host_memory="4GiB", learning_rate=1e-3, weight_decay=0.1, output=tmp_path / "run", max_grad_norm=None),
    ) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed % 4)).loss for seed in range(100)]
    assert losses[0] == pytest.approx(expected[0], rel=2e-3)
    worst = max(abs(got - want) / want for got, want in zip(losses, expected, strict=True) if want > 0.5)
    assert worst < 0.03, f"largest relative difference {worst:.3f}"


@pytest.mark.wide
def test_gradients_can_be_drained_in_float32(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Micro-batches are summed in fp32 either way; without rounding the sum to bf16 the weights differ, and little."""
    path = model_dir("llama", "bfloat16")
    rounded = train(path, tmp_path / "a", adjust=micro_batches(2))
    exact = train(path, tmp_path / "b", adjust=micro_batches(2), gradient_dtype="float32")
    assert exact[0] == pytest.approx(rounded[0], rel=1e-3)
    assert any(not torch.equal(exact[1][key], rounded[1][key]) for key in rounded[1])


@pytest.mark.wide
def test_float16_overflow_skips_the_step_and_halves_the_scale(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    events = []
    with Engine.open(
        path,
        headrace.Options(
            host_memory="4GiB", learning_rate=1e-3, output=tmp_path / "run", max_grad_norm=None, compute_dtype="float16"
        ),
        sink=lambda event: events.append(event) if isinstance(event, StepResult) else None,
    ) as engine:
        engine._loss_scale = dataclasses.replace(engine._loss_scale or _fresh_scale(), scale=2.0**26)
        results = [engine.step(batch_of(ROWS, LENGTH, 0)) for _ in range(16)]
    skipped = [result for result in results if result.skipped]
    assert skipped, "a loss scale of 2^26 must overflow float16"
    assert skipped[0].loss_scale == 2 * results[1].loss_scale
    # A skipped step changes nothing: the loss is the same until the first step that is applied.
    assert len({result.loss for result in results[: len(skipped) + 1]}) == 1
    assert results[-1].loss < results[0].loss
    assert [event.step for event in events if event.skipped] == [result.step for result in skipped]


def _fresh_scale() -> Any:
    from headrace.update import LossScale

    return LossScale()


@pytest.mark.parametrize("clip", [None, 1.0], ids=["immediate", "deferred"])
def test_a_gradient_that_is_not_finite_skips_the_step(
    clip: float | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama", "bfloat16")
    with Engine.open(
        path, headrace.Options(host_memory="4GiB", learning_rate=1e-3, output=tmp_path / "run", max_grad_norm=clip)
    ) as engine:
        first = engine.step(batch_of(ROWS, LENGTH, 0))
        block = engine.chain.block

        def poisoned(index: int, hidden: torch.Tensor, call: Any) -> Any:
            result = block(index, hidden, call)
            if index == 1 and torch.is_grad_enabled():
                result.hidden.register_hook(lambda gradient: gradient * float("nan"))
            return result

        engine.chain.block = poisoned  # type: ignore[method-assign]
        bad = engine.step(batch_of(ROWS, LENGTH, 1))
        engine.chain.block = block  # type: ignore[method-assign]
        again = engine.step(batch_of(ROWS, LENGTH, 1))
    assert first.skipped is None
    assert bad.skipped is not None
    assert again.skipped is None
    assert again.loss == bad.loss, "the skipped step changed the weights"


def test_a_step_can_be_resumed_bit_for_bit(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("gpt2-dropout", "bfloat16")
    options = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "max_grad_norm": 1.0}
    unbroken, weights = train(path, tmp_path / "whole", steps=4, max_grad_norm=1.0)
    with Engine.open(
        path, headrace.Options(host_memory="4GiB", learning_rate=1e-3, weight_decay=0.1, output=tmp_path / "run", **options)
    ) as engine:
        losses = [engine.step(batch_of(ROWS, LENGTH, seed), position={"next": seed + 1}).loss for seed in range(2)]
    with Engine.resume(tmp_path / "run") as engine:
        assert engine.step_index == 2
        assert engine.position == {"next": 2}
        losses.append(engine.step(batch_of(ROWS, LENGTH, 2)).loss)
        engine.save_pretrained(tmp_path / "between")  # which gives back what steps work in
        losses.append(engine.step(batch_of(ROWS, LENGTH, 3)).loss)
        engine.save_pretrained(tmp_path / "out")
    assert losses == unbroken
    for key, want in weights.items():
        assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[key], want), key


@pytest.mark.parametrize(("clip", "resident"), sampled([(None, False), (None, True), (1.0, False), (1.0, True)]))
def test_every_byte_is_some_steps(clip: float | None, resident: bool, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Also what runs on between two steps, what the last flush writes, and states in memory, which only commits write; not
    what an export reads.
    """
    said: list[Any] = []

    def states_in_memory(plan: Any) -> Any:
        every = tuple(range(len(plan.units)))
        if clip:
            kept = {"resident_states": every if resident else (), "late_units": () if resident else (1,)}
        elif resident:
            kept = {"resident_states": every, "late_units": every, "update_policy": "deferred"}
        else:
            kept = {"resident_states": (), "late_units": (1,), "update_policy": "immediate"}
        return changed(plan.with_results(speculation=None), **kept)

    with Engine.open(
        model_dir("llama"),
        headrace.Options(
            host_memory="4GiB",
            learning_rate=1e-3,
            output=tmp_path / "run",
            max_grad_norm=clip,
            tokens_per_step=ROWS * LENGTH,
            sequence_length=LENGTH,
        ),
        adjust_plan=states_in_memory,
        sink=said.append,
    ) as engine:
        store = engine.store
        before = store.bytes_read, store.bytes_written
        for seed in range(3):
            engine.step(batch_of(ROWS, LENGTH, seed))
        engine.flush()
        exported = store.bytes_read
        engine.save_pretrained(tmp_path / "out")
        exported = store.bytes_read - exported
        assert exported > 0
        engine.step(batch_of(ROWS, LENGTH, 3))
        engine.flush()
        moved = store.bytes_read - before[0] - exported, store.bytes_written - before[1]
    counted = [event for event in said if isinstance(event, StepResult | Flushed)]
    assert sum(event.bytes_read["ssd"] for event in counted) == moved[0]
    assert sum(event.bytes_written["ssd"] for event in counted) == moved[1]
    of_lanes = sum(event.bytes for event in said if isinstance(event, OpDone) and event.lane == "ssd-write")
    assert of_lanes == moved[1]


def test_batches_that_cannot_be_used_are_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    batch = batch_of(2, 16, 0)
    with Engine.open(
        model_dir("llama"), headrace.Options(host_memory="4GiB", output=tmp_path / "run", max_grad_norm=None)
    ) as engine:
        with pytest.raises(ValueError, match="none of its 32 labels is trained"):
            engine.step({**batch, "labels": torch.full_like(batch["labels"], -100)})
        with pytest.raises(ValueError, match="input_ids has token 384; the model has embeddings for 0 to 383"):
            engine.step({**batch, "input_ids": batch["input_ids"] + 384 - batch["input_ids"].max()})
        with pytest.raises(ValueError, match=r"labels has token -1; .* or -100 for labels that are not trained"):
            engine.step({**batch, "labels": torch.full_like(batch["labels"], -1)})
        with pytest.raises(ValueError, match="position_ids must be an integer tensor"):
            engine.step({**batch, "position_ids": torch.zeros(2, 5, dtype=torch.long)})
        with pytest.raises(ValueError, match="unknown keys"):
            engine.step({**batch, "token_type_ids": batch["labels"]})
        with pytest.raises(ValueError, match="needs input_ids and labels"):
            engine.step({"input_ids": batch["input_ids"]})
        # and the engine still works
        assert engine.step(batch).loss > 0


def threads_of(verb: str) -> int:
    return sum(thread.name.startswith(f"headrace-ssd-{verb}-") for thread in threading.enumerate())


def test_an_engine_plans_for_the_drives_that_it_has(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    machine = load_profile("rtx4090-4ssd")
    (tmp_path / "ssd").mkdir()
    for name, ssd in (("without", ()), ("with", [tmp_path / "ssd"])):
        with Engine.open(
            model_dir("llama"), headrace.Options(host_memory="4GiB", ssd=ssd, output=tmp_path / name, machine=machine)
        ) as engine:
            assert engine.options.machine is not None
            assert len(engine.options.machine.drives) == 1


@pytest.mark.deep
def test_an_engine_plans_within_the_space_of_its_drives(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where space for block inputs is short they wait in memory, as `headrace plan` says; it is no reason to refuse the run."""
    machine = load_profile("rtx4090-1ssd")
    fast = dataclasses.replace(
        machine.drives[0], read_bytes_per_second=4e11, write_bytes_per_second=4e11, mixed_bytes_per_second=8e11
    )
    machine = dataclasses.replace(machine, has_device=False, device_memory_bytes=0, drives=(fast,))
    (tmp_path / "ssd").mkdir()
    usable = space.default_bytes

    def opened(name: str) -> Engine:
        return Engine.open(
            model_dir("llama"),
            headrace.Options(
                host_memory="500MiB",
                ssd=tmp_path / "ssd",
                output=tmp_path / name,
                max_grad_norm=None,
                machine=machine,
                tokens_per_step=1024 * LENGTH,
                sequence_length=LENGTH,
            ),
        )

    with opened("roomy") as engine:
        roomy = engine.plan
        assert roomy is not None
        assert roomy.results.peak_bytes["ssd"]["scratch"] > 0
        assert roomy.results.allowed_bytes["ssd"] > 1 << 30
        engine.remove_state()
    monkeypatch.setattr(space, "default_bytes", lambda tier, free: min(roomy.peak("ssd") - 1, usable(tier, free)))
    with opened("short") as engine:
        assert engine.plan is not None
        assert engine.plan.peak("ssd") < roomy.peak("ssd")
        assert engine.step(batch_of(64, LENGTH, 0)).loss > 0


@pytest.mark.parametrize("ssd", [False, True])
def test_an_import_that_is_broken_off_leaves_no_directory(ssd: bool, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    def breaks_off(event: object) -> None:
        if isinstance(event, Notice) and event.text.startswith("importing"):
            raise KeyboardInterrupt

    (tmp_path / "ssd").mkdir()
    with pytest.raises(KeyboardInterrupt):
        Engine.open(
            model_dir("llama"),
            headrace.Options(host_memory="4GiB", ssd=[tmp_path / "ssd"] if ssd else (), output=tmp_path / "runs" / "first"),
            sink=breaks_off,
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["ssd"]


def test_a_state_that_cannot_be_made_leaves_no_directory(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Engine.open(
            model_dir("llama"), headrace.Options(ssd=tmp_path / "none", output=tmp_path / "runs" / "first", max_grad_norm=None)
        )
    monkeypatch.setattr(run_folders, "default_bytes", lambda tier, free: 0)
    with pytest.raises(DiskFull):
        Engine.open(
            model_dir("llama"), headrace.Options(host_memory="4GiB", output=tmp_path / "runs" / "first", max_grad_norm=None)
        )
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_cannot_be_made_is_named(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = {tmp_path / "file": "expected a directory", tmp_path / "file" / "below": "cannot be made"}
    for run, what in told.items():
        with pytest.raises(RunDirectoryError, match=f"{run}: {what}.*; name another run directory"):
            Engine.open(model_dir("llama"), headrace.Options(host_memory="4GiB", output=run, max_grad_norm=None))


def test_measured_drives_say_how_the_store_moves_bytes_also_after_resume(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = load_profile("rtx4090-1ssd")
    tuned = dataclasses.replace(machine.drives[0], threads_per_direction=3, piece_bytes=1 << 20)
    machine = dataclasses.replace(machine, drives=(tuned,))
    told: list[InFlight] = []
    keep = StateStore.keep_in_flight
    monkeypatch.setattr(StateStore, "keep_in_flight", lambda store, setting: (told.append(setting), keep(store, setting)))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run = tmp_path / "run"
    before = threads_of("read"), threads_of("write")
    with Engine.open(
        model_dir("llama"),
        headrace.Options(host_memory="4GiB", ssd=[tmp_path / "one", tmp_path / "two"], output=run, machine=machine),
    ) as engine:
        assert (threads_of("read") - before[0], threads_of("write") - before[1]) == (3, 3)  # both lie on one drive
        result = engine.step(batch_of(ROWS, LENGTH, 0))
        assert result.io_cpu_seconds is not None
        assert 0 < result.io_cpu_seconds <= engine.store.io_cpu_seconds
    with Engine.resume(run):
        assert (threads_of("read") - before[0], threads_of("write") - before[1]) == (3, 3)
    assert told == [InFlight(threads=3, piece_bytes=1 << 20)] * 2


def test_several_directories_of_one_drive_beside_another_drive(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drive counts once, with its own setting and its own space, in the run and after it is resumed."""
    machine = load_profile("rtx4090-1ssd")
    quick = dataclasses.replace(machine.drives[0], threads_per_direction=2, piece_bytes=1 << 20)
    slow = dataclasses.replace(machine.drives[0], threads_per_direction=5, piece_bytes=4 << 20)
    machine = dataclasses.replace(machine, drives=(quick, quick, slow))
    told: list[InFlight] = []
    monkeypatch.setattr(StateStore, "keep_in_flight", lambda store, setting: told.append(setting))
    for module in (
        "headrace.engine.beginning",
        "headrace.engine.tuning",
        "headrace.files.directory_facts",
        "headrace.files.space",
    ):
        monkeypatch.setattr(f"{module}.file_systems", lambda directories: (0, 0, 2))
    ssd = [tmp_path / name for name in ("first", "second", "third")]
    for directory in ssd:
        directory.mkdir()
    run = tmp_path / "run"
    with Engine.open(
        model_dir("llama"), headrace.Options(host_memory="4GiB", ssd=ssd, output=run, max_grad_norm=None, machine=machine)
    ) as engine:
        assert engine.options.machine == dataclasses.replace(machine, drives=(quick, slow))
    with Engine.resume(run) as engine:
        assert engine.step(batch_of(ROWS, LENGTH, 0)).loss > 0
    assert told == [InFlight(threads=7, piece_bytes=4 << 20)] * 2


def test_without_a_profile_the_store_keeps_its_defaults(
    model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateStore, "keep_in_flight", lambda store, setting: pytest.fail("nobody measured"))
    before = threads_of("read")
    with Engine.open(model_dir("llama"), headrace.Options(host_memory="4GiB", output=tmp_path / "run", max_grad_norm=None)):
        assert threads_of("read") - before == InFlight().threads
