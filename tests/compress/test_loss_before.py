"""The loss that `compress` finds before rounding, and that of `eval`, is plain transformers' own, for each architecture.

Blocks hand on what they hand on, such as float32 in a model of bfloat16. Run: pytest tests/compress/test_loss_before.py
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain

from headrace.codec.targets import Int4Target
from headrace.compress.hidden_rows import HiddenRows
from headrace.compress.quantiser import Quantiser
from headrace.compress.verbs import DataRows
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.uses.evaluator import Evaluator
from headrace.machine.cpu import CpuMachine
from headrace.model import IGNORED, MicroBatch, WideProducts, self_check
from headrace.terms.errors import ModelError
from headrace.terms.options.budget import Budget
from headrace.terms.options.generate_options import GenerateOptions

LENGTH = 16
# MiniMax of bfloat16 does not run in stock transformers: its own code multiplies float32 with bfloat16.
CASES = [(name, dtype) for name in CONFIGS for dtype in ("bfloat16", "float32") if (name, dtype) != ("minimax", "bfloat16")]
QUICK = [("mamba2", "bfloat16"), ("llama", "bfloat16"), ("lfm2", "float32")]


def rows(seed: int, *, held_out: bool) -> DataRows:
    ids = torch.randint(3, 90, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    batch = MicroBatch(ids, ids.clone(), None, torch.arange(LENGTH).expand(2, LENGTH))
    return DataRows(batch, torch.ones_like(ids, dtype=torch.bool), held_out)


@pytest.mark.parametrize(("name", "dtype"), sampled(CASES, QUICK))
def test_the_loss_before_is_that_of_plain_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    config = make_config(CONFIGS[name])
    plain = make_plain(config, getattr(torch, dtype)).eval()
    plain.save_pretrained(tmp_path / "model")
    (tmp_path / "work").mkdir()
    held_out = rows(2, held_out=True)
    try:
        quantiser = Quantiser(
            tmp_path / "model",
            Int4Target(32),
            [rows(1, held_out=False), held_out],
            tmp_path / "work",
            compute_dtype=dtype,
            host_bytes=1 << 30,
        )
        quantiser.prepare(blocks_done=0)
    except ModelError as error:
        pytest.skip(f"refused: {error}")
    quantiser.run(lambda block, code, left: None)
    before, _, tokens = quantiser.losses()
    quantiser.close()
    ids = held_out.batch.input_ids
    assert tokens == ids[:, 1:].numel()
    assert before == pytest.approx(loss_of(plain, ids, dtype), rel=tolerance(dtype))


@pytest.mark.parametrize(("name", "dtype"), sampled(CASES, QUICK))
def test_eval_finds_the_loss_of_plain_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    plain = make_plain(make_config(CONFIGS[name]), getattr(torch, dtype)).eval()
    plain.save_pretrained(tmp_path / "model")
    batch = rows(2, held_out=True).batch
    given = {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}
    opened = GenerationModel.of_directory(tmp_path / "model", Budget(host="4GiB"), dtype, None, self_check)
    with Evaluator(opened, GenerateOptions(host_memory="4GiB"), LENGTH) as evaluator:
        evaluator.prepare(len(batch.input_ids))
        ((scored, total),) = evaluator.losses([given])
    assert total / scored.scored_tokens == pytest.approx(loss_of(plain, batch.input_ids, dtype), rel=tolerance(dtype))


def loss_of(plain: Any, ids: torch.Tensor, dtype: str) -> float:
    with torch.no_grad(), _as_here(dtype):
        logits = plain(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=IGNORED))


def tolerance(dtype: str) -> float:
    return 1e-5 if dtype == "float32" else 2e-3


def _as_here(dtype: str) -> Any:
    return nullcontext() if CpuMachine().multiplies(dtype) else WideProducts()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_come_back_in_the_dtype_in_which_they_were_written(dtype: torch.dtype, tmp_path: Path) -> None:
    file = HiddenRows(tmp_path / "rows", [(2, 3), (4,)])
    first, second = torch.randn(2, 3).to(dtype), torch.randn(4)
    file.write(1, second)
    file.write(0, first)
    file.close()
    again = HiddenRows(tmp_path / "rows", [(2, 3), (4,)])
    assert again.read(0).dtype == dtype
    assert torch.equal(again.read(0), first)
    assert torch.equal(again.read(1), second)
    again.close()
