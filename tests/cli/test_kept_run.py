"""A run that keeps models, by the real engine: each has the bits of a run that ends there, and training has the same bits.

Run: pytest tests/cli/test_kept_run.py
"""

import json
from pathlib import Path

import pytest
from bad_worlds import World
from tiers import sampled
from transformers import AutoModelForCausalLM

from headrace.cli import main

WAYS: dict[str, tuple[str, ...]] = {
    "full": (),
    "adapters": ("--adapter", "lora:rank=2", "--learning-rate", "1e-2"),
    "seldom": ("--checkpoint-every", "3"),
    "unclipped": ("--max-grad-norm", "0"),
    "float32": ("--compute-dtype", "float32"),
    "matrices": ("--train", "matrices"),
    "lsp": ("--gradient", "lsp:dimension=8,check=2"),
    "lomo": ("--optimizer", "lomo"),
    "device tier": ("--device-memory", "64MiB"),
    "plain": ("interpreter=plain",),
    "pairs": ("--loss", "dpo:beta=0.5"),
    "pairs, adapters": ("--loss", "dpo:beta=0.5", "--adapter", "lora:rank=2", "--learning-rate", "1e-2"),
}
PAIRS = [{"prompt": f"{i} drops flow to", "chosen": f" turbine {i}", "rejected": f" {i} desert"} for i in range(24)]


def ran(world: World, name: str, *words: str, steps: int) -> Path:
    """Run `headrace train` in the world's folder `name` and return that; on pairs, where its loss is over these."""
    if "--loss" in words:
        world.write_rows(*PAIRS)
    with pytest.raises(SystemExit) as left:
        main(world.train_words("--learning-rate", "1e-3", "--seed", "3", *words, max_steps=steps, output=world.folder / name))
    assert not left.value.code
    return world.folder / name


def weights(model: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in model.glob("*.safetensors")}
    assert found
    return found


@pytest.mark.parametrize("way", sampled(list(WAYS), ["full"]))
def test_each_checkpoint_is_final_of_a_run_that_ends_there(way: str, world: World) -> None:
    kept = ran(world, "kept", *WAYS[way], "--save-steps", "2", steps=5)
    steps = (2, 4, 5)
    assert sorted(path.name for path in kept.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in steps]
    assert len({tuple(sorted(weights(kept / f"checkpoint-{step}").items())) for step in steps}) == 3, "each step changed it"
    for step in (2,) if way == "full" else (4,):
        ended = ran(world, f"ended-{step}", *WAYS[way], steps=step)
        assert weights(kept / f"checkpoint-{step}") == weights(ended / "final")
    names = {path.name for path in (kept / "final").iterdir()}
    assert {path.name for path in (kept / "checkpoint-4").iterdir()} | {"README.md"} == names
    assert weights(kept / "final") == weights(kept / "checkpoint-5")
    config = kept / "checkpoint-2" / ("adapter_config.json" if "--adapter" in WAYS[way] else "config.json")
    assert json.loads(config.read_text())
    if "--adapter" not in WAYS[way]:
        AutoModelForCausalLM.from_pretrained(kept / "checkpoint-2")
