"""The engine on a GPU trains like plain PyTorch there and like itself on the CPU, and where things lie changes no bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_world import LENGTH, ROWS, PlainTrainer, batch_of, train, train_on_cpu
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.trainer import Engine
from headrace.flow.step import compute
from headrace.model import Replay

pytestmark = pytest.mark.gpu
STEPS = 3


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2", "gemma3", "mixtral-aux"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["immediate", "deferred"])
def test_float32_is_plain_pytorch_on_the_gpu(
    name: str, clip: float | None, gpu: torch.device, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir(name)
    plain = PlainTrainer(path, gpu, clip)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed)) for seed in range(STEPS)]
    losses, _ = train(path, tmp_path / "run", steps=STEPS, compute_dtype="float32", max_grad_norm=clip)
    assert losses == pytest.approx(expected, rel=2e-5)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "run-out", dtype=torch.float32)
    for (key, got), want in zip(ours.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(got, want.cpu(), rtol=1e-3, atol=2e-4, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_float32_is_what_the_cpu_computes(
    name: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_dir(name)
    on_cpu, _ = train_on_cpu(monkeypatch, path, tmp_path / "cpu", steps=STEPS, compute_dtype="float32", max_grad_norm=1.0)
    on_gpu, _ = train(path, tmp_path / "gpu", steps=STEPS, compute_dtype="float32", max_grad_norm=1.0)
    assert on_gpu == pytest.approx(on_cpu, rel=2e-5)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_sixteen_bits_follow_float32(
    compute_dtype: str, gpu: torch.device, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    path = model_dir("llama", "bfloat16")
    plain = PlainTrainer(path, gpu, None)
    expected = [plain.step(batch_of(ROWS, LENGTH, seed % 2)) for seed in range(30)]
    with Engine.open(
        path,
        headrace.Options(
            device_memory="2GiB",
            host_memory="4GiB",
            learning_rate=1e-3,
            weight_decay=0.1,
            output=tmp_path / "run",
            max_grad_norm=None,
            compute_dtype=compute_dtype,
        ),
    ) as engine:
        losses: list[float] = []
        while len(losses) < 30:
            assert engine.step_index < 50, "too many steps were skipped"
            result = engine.step(batch_of(ROWS, LENGTH, len(losses) % 2))
            losses += [] if result.skipped else [result.loss]  # float16 skips steps until its loss scale fits
    assert losses[0] == pytest.approx(expected[0], rel=5e-3)
    assert losses == pytest.approx(expected, rel=5e-2, abs=2e-2)
    assert losses[-1] < 0.9 * losses[0]


PLACEMENTS: dict[str, dict[str, Any]] = {
    "again": {},
    "plain": {"interpreter": "plain"},
    "two-slots": {"adjust": {"host_slots": 2, "device_slots": 2, "prefetch": 1, "state_slots": 1, "gradient_slots": 1}},
    "stash-device": {"adjust": {"stash_tiers": ("device",) * 4, "stash_slots": 0}},
    "stash-host": {"adjust": {"stash_tiers": ("host",) * 4, "stash_slots": 0}},
    "stash-ssd": {"adjust": {"stash_tiers": ("ssd",) * 4, "stash_slots": 2}},
    "stash-mixed": {"adjust": {"stash_tiers": ("host", "ssd", "ssd", "device"), "stash_slots": 2}},
    "mixed-plain": {"adjust": {"stash_tiers": ("host", "ssd", "ssd", "device"), "stash_slots": 2}, "interpreter": "plain"},
    "small-chunks": {"adjust": {"chunk_elements": 4096}},
    "device-updates": {"adjust": {"device_update_every": 1}},
    "device-updates-mixed": {"adjust": {"device_update_every": 2, "chunk_elements": 4096, "state_slots": 2}},
    "device-updates-plain": {"adjust": {"device_update_every": 3, "chunk_elements": 4096}, "interpreter": "plain"},
    "no-replay": {"adjust": {"kept": ((),) * 4, "kept_bytes": (0,) * 4, "skipped": ((),) * 4, "spared_flops": (0.0,) * 4}},
}


@pytest.mark.parametrize("clip", [None, 0.5], ids=["immediate", "deferred"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2-dropout"])
@pytest.mark.usefixtures("same_bits")
def test_placement_changes_nothing(name: str, clip: float | None, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir(name, "bfloat16")
    losses, weights = train(path, tmp_path / "base", max_grad_norm=clip)
    for number, (placement, options) in enumerate(PLACEMENTS.items()):
        got = train(path, tmp_path / f"run{number}", max_grad_norm=clip, **options)
        assert got[0] == losses, f"{placement}: losses differ"
        for key, want in weights.items():
            assert torch.equal(got[1][key], want), f"{placement}: {key} differs"


@pytest.mark.parametrize("tier", ["device", "host", "ssd"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt2-dropout", "gemma3"])
@pytest.mark.usefixtures("same_bits")
def test_replay_changes_nothing_and_is_used(
    name: str, tier: str, model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also holds that the operators of the profile, made from fake tensors, are those that the GPU runs."""
    path, stash_slots = model_dir(name, "bfloat16"), 4 if tier == "ssd" else 0
    placed = {"stash_tiers": (tier,) * 4, "stash_slots": stash_slots}
    recompute = {**placed, "kept": ((),) * 4, "kept_bytes": (0,) * 4, "skipped": ((),) * 4}
    expected = train(path, tmp_path / "recompute", adjust=recompute)
    replayed: list[int] = []

    def counting(kept: Any, skipped: frozenset[int] = frozenset(), **names: Any) -> Replay:
        replayed.append(len(kept))
        return Replay(kept, skipped, **names)

    monkeypatch.setattr(compute, "Replay", counting)
    everything = {
        **placed,
        "kept": lambda plan: tuple(tuple(range(len(names))) for names in plan.stash.operators),
        "kept_bytes": (4 << 20,) * 4,
    }
    operators: list[int] = []
    got = train(
        path,
        tmp_path / "replay",
        adjust=everything,
        inspect=lambda engine: operators.extend(len(names) for names in engine.plan.stash.operators),
    )
    again = 1 if name == "gpt2-dropout" else 0  # attention draws numbers then
    assert {count + again for count in replayed} == set(operators), (
        "a block kept less than it was told to: its operators are not those of the plan"
    )
    assert "attention" in {name for names in [engine_names(path, tmp_path)] for name in names}
    assert got[0] == expected[0]
    for key, want in expected[1].items():
        assert torch.equal(got[1][key], want), key


def engine_names(path: Path, tmp_path: Path) -> tuple[str, ...]:
    """Return the operators of the last block as planned on this device."""
    names: list[tuple[str, ...]] = []
    train(path, tmp_path / "names", steps=1, inspect=lambda engine: names.append(engine.plan.stash.operators[-1]))
    return names[0]


@pytest.mark.usefixtures("same_bits")
def test_a_run_is_resumed_bit_for_bit(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("gpt2-dropout", "bfloat16")
    options = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "max_grad_norm": 1.0}
    results: dict[str, tuple[list[float], dict[str, torch.Tensor]]] = {}
    for name, parts in (("whole", (4,)), ("broken", (2, 2))):
        losses: list[float] = []
        for number, steps in enumerate(parts):
            opened = (
                Engine.resume(tmp_path / name)
                if number
                else Engine.open(
                    path,
                    headrace.Options(
                        device_memory="2GiB", host_memory="4GiB", learning_rate=1e-3, output=tmp_path / name, **options
                    ),
                )
            )
            with opened as engine:
                losses += [engine.step(batch_of(ROWS, LENGTH, len(losses) + index)).loss for index in range(steps)]
                engine.save_pretrained(tmp_path / f"{name}-{number}")
        results[name] = losses, load_file(tmp_path / f"{name}-{len(parts) - 1}" / "model.safetensors")
    assert results["broken"][0] == results["whole"][0]
    for key, want in results["whole"][1].items():
        assert torch.equal(results["broken"][1][key], want), key
