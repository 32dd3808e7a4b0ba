"""Every engine hands on, from block to block, what plain transformers does: values and dtype, for each architecture.

Run: pytest tests/generation/passes/test_hidden_states.py
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from short_run import short_run
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain
from torch._subclasses.fake_tensor import FakeTensor

from headrace.codec.targets import Int4Target
from headrace.compress.quantiser import Quantiser
from headrace.compress.verbs import DataRows
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.uses.evaluator import Evaluator
from headrace.machine.cpu import CpuMachine
from headrace.model import MicroBatch, WideProducts, self_check
from headrace.model.blocks.find_blocks import find_blocks
from headrace.model.parts.runner import Runner
from headrace.terms.errors import ModelError
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions

LENGTH = 16
IDS = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(2))
Hidden = dict[int, list[torch.Tensor]]


def by_training(model: Path, dtype: str) -> None:
    more = {"compute_dtype": dtype, "adjust": {"micro_batch_sequences": 1, "num_micro_batches": 2, "accumulate": True}}
    short_run(model, model.parent / "run", [{"input_ids": IDS, "labels": IDS}], **more)


def by_compressing(model: Path, dtype: str) -> None:
    """The held-out rows pass a block with its weights as they came, before both kinds of rows pass it as coded; behind the last
    block nobody needs the others.
    """
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    rows = [DataRows(MicroBatch(IDS.clone(), IDS, None, positions), torch.ones_like(IDS, dtype=torch.bool))]
    rows.append(DataRows(MicroBatch(IDS, IDS, None, positions), torch.ones_like(IDS, dtype=torch.bool), held_out=True))
    (model.parent / "work").mkdir()
    how: dict[str, Any] = {"compute_dtype": dtype, "host_bytes": 1 << 30}
    quantiser = Quantiser(model, Int4Target(32), rows, model.parent / "work", **how)
    try:
        quantiser.prepare(blocks_done=0)
        quantiser.run(lambda block, code, left: None)
    finally:
        quantiser.close()


def by_eval(model: Path, dtype: str) -> None:
    opened = GenerationModel.of_directory(model, Budget(host="4GiB"), dtype, None, self_check)
    with Evaluator(opened, GenerateOptions(host_memory="4GiB", rows=2, seats=1), LENGTH) as evaluator:
        evaluator.prepare(2)
        list(evaluator.losses([{"input_ids": IDS, "labels": IDS}]))


def by_generating(model: Path, dtype: str) -> None:
    options = GenerateOptions(host_memory="4GiB", rows=2, seats=1, compute_dtype=dtype)
    with Generator.open(model, options=options) as generator:
        list(generator.generate(IDS.tolist(), max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=2))


ENGINES = {each.__name__: each for each in (by_training, by_compressing, by_eval, by_generating)}
# MiniMax of bfloat16 does not run in stock transformers: its own code multiplies float32 with bfloat16.
CASES = [
    (engine, name, dtype)
    for engine in ENGINES
    for name in CONFIGS
    for dtype in ("bfloat16", "float32")
    if (name, dtype) != ("minimax", "bfloat16")
]
QUICK = [(engine, "mamba2", "bfloat16") for engine in ENGINES]
QUICK += [("by_compressing", "mixtral", "float32"), ("by_generating", "gemma3", "float32")]


def caught(run: Callable[[], None], patch: pytest.MonkeyPatch) -> Hidden:
    """Return what each block gave to whole rows, in the order of rows.

    Backward's recomputing does not count, nor do trials of an architecture, which come first, and on shapes alone.
    """
    found: dict[Runner, Hidden] = {}
    plain, last = Runner._block, list[Runner]()

    def block(runner: Runner, code: Any, index: int, *given: Any) -> Any:
        result = plain(runner, code, index, *given)
        rows = result.hidden
        if not torch.is_grad_enabled() and rows.shape[1] == LENGTH and not isinstance(rows, FakeTensor):
            found.setdefault(runner, {}).setdefault(index, []).append(rows.clone())
            last[:] = [runner]
        return result

    with patch.context() as patched:
        patched.setattr(Runner, "_block", block)
        run()
    return found[last[0]]


def of_transformers(plain: Any, dtype: str) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(module: Any, args: Any, out: Any) -> None:
        found.append(out[0] if isinstance(out, tuple) else out)

    hooks = [block.register_forward_hook(keep) for block in find_blocks(plain).modules]
    with torch.no_grad(), nullcontext() if CpuMachine().multiplies(dtype) else WideProducts():
        plain(input_ids=IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(("engine", "name", "dtype"), sampled(CASES, QUICK))
def test_blocks_hand_on_what_they_do_in_plain_transformers(
    engine: str, name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_plain(make_config(CONFIGS[name]), getattr(torch, dtype)).eval()
    plain.save_pretrained(tmp_path / "model")
    expected = of_transformers(plain, dtype)
    try:
        found = caught(lambda: ENGINES[engine](tmp_path / "model", dtype), monkeypatch)
    except ModelError as error:
        assert engine != "by_training"
        pytest.skip(f"refused: {error}")
    assert sorted(found) == list(range(len(expected)))
    for block, wanted in enumerate(expected):
        first = 0 if engine != "by_compressing" else -3 if block + 1 < len(expected) else -2
        hidden = torch.cat(found[block][first:])[: len(IDS)]
        assert hidden.dtype == wanted.dtype, f"block {block}"
        difference, largest = (hidden - wanted).abs().max().item(), wanted.abs().max().item()
        assert difference <= (1e-5 if dtype == "float32" else 2e-2) * largest, f"block {block}"
