"""Models compressed to ternary weights: what their files hold, read by other means, and what is refused.

Run: pytest tests/compress/test_ternary_models.py
"""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressing import run, write_words
from safetensors.torch import load_file, save_file
from test_compression import tensors_of

import headrace
from headrace.compress.decompression import decompress_model
from headrace.engine import Engine, Seams
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows
from headrace.terms.errors import ModelError, StepFailed
from headrace.terms.options.budget import Budget
from headrace.testing import RowWire


@pytest.fixture(scope="module", params=["as small as may be", "words wherever they are shorter"])
def ternary(request: Any, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("ternary")
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("words"):
            write_words(patch)
        yield folder, run(mixture, folder, to="ternary", experts_only=True)


def decoded(parts: dict[str, torch.Tensor], stem: str, unit: int) -> np.ndarray[Any, Any]:
    """Read a matrix by the description of the format alone, symbol by symbol."""
    rows, columns, zeros = parts[f"{stem}weight_shape"].tolist()
    levels = parts[f"{stem}weight_levels"].double().numpy()
    symbols: list[list[int]] = []
    if not zeros:
        for stored in parts[f"{stem}weight_trits"].tolist():
            symbols.append([byte // 3**place % 3 for byte in stored for place in range(5)][:columns])
    else:
        table = parts[f"headrace.dictionary.{zeros}.{unit}"].numpy().view(np.uint32)
        words, offsets = parts[f"{stem}weight_codes"].tolist(), parts[f"{stem}weight_row_offsets"].tolist()
        for start, stop in pairwise(offsets):
            row: list[int] = []
            for word in words[start:stop]:
                halves = [int(half) for half in table[word]]
                row += [half >> (4 + 2 * at) & 3 for half in halves for at in range(14)][: 2 * (halves[0] & 15)]
            symbols.append(row[:columns])
    values = np.concatenate([np.zeros((rows, 1)), levels], axis=1)
    return np.take_along_axis(values, np.array(symbols), axis=1)


@pytest.mark.wide
def test_experts_are_three_values_a_row_and_come_back_as_ordinary_weights(ternary: Any, mixture: Path, tmp_path: Path) -> None:
    folder, _ = ternary
    before, after = tensors_of(mixture), tensors_of(decompress_model(folder / "out", tmp_path / "plain"))
    assert before.keys() == after.keys()
    seen = 0
    for unit, path in enumerate(sorted((folder / "out").glob("*.safetensors"))):
        parts = load_file(path)
        for name in parts:
            if name.endswith("weight_levels"):
                key, seen = name.removesuffix("_levels"), seen + 1
                assert np.array_equal(after[key].double().numpy(), decoded(parts, name.removesuffix("weight_levels"), unit)), (
                    key
                )
                assert ".experts." in key
                original = before[key].to(torch.bfloat16)
                for row, levels in zip(original, parts[name], strict=True):
                    assert levels.tolist() in (
                        [row.min(), row.max()],
                        [0, row.max()],
                        [row.min(), 0],
                    ), "nothing is clipped; a level that is not used is zero"
    assert seen == 3 * 4 * 3
    rest = {key for key in before if ".experts." not in key}
    assert rest
    assert all(torch.equal(before[key], after[key]) for key in rest)


def test_a_dictionary_that_was_changed_is_refused(ternary: Any, tmp_path: Path) -> None:
    shutil.copytree(ternary[0] / "out", tmp_path / "out")
    if not any("dictionary" in key for path in (tmp_path / "out").glob("*.safetensors") for key in load_file(path)):
        return  # small matrices are in trits
    path = next(
        path for path in sorted((tmp_path / "out").glob("*.safetensors")) if any("dictionary" in k for k in load_file(path))
    )
    parts = load_file(path)
    name = next(name for name in parts if name.startswith("headrace.dictionary."))
    parts[name][77, 0] ^= 1 << 6
    save_file(parts, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"has the digest .*, expected was .*: it is damaged"):
        decompress_model(tmp_path / "out", tmp_path / "plain")
    del parts[name]
    save_file(parts, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"\.index\.json, not in the file"):
        decompress_model(tmp_path / "out", tmp_path / "plain")


def test_words_that_do_not_make_their_rows_are_refused_where_a_block_is_decoded(ternary: Any, tmp_path: Path) -> None:
    shutil.copytree(ternary[0] / "out", tmp_path / "out")
    for path in sorted((tmp_path / "out").glob("*.safetensors")):
        parts = load_file(path)
        for name in parts:
            if name.endswith("weight_codes"):
                parts[name] = torch.full_like(parts[name].view(torch.int16), 12).view(torch.uint16)  # 26 zeros each
            elif name.endswith("weight_trits"):
                parts[name][-1, 0] = 243
        save_file(parts, path, {"format": "pt"})
    with Generator.open(tmp_path / "out", Budget(host="4GiB"), compute_dtype="float32") as generator:
        batch = SeatRows(0, (tuple(range(7, 16)),), 1, generator.model.settings(9, None, {"max_new_tokens": 2}))
        generator.use(generator.plan_only(1, 9, 2))
        with pytest.raises(StepFailed, match=r"ternary weights: row \d+ of \d+ is damaged, its code does not make"):
            list(generator.run([batch]))


def trained(model: Path, run: Path, device_memory: str | None) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Return losses, exported weights and the bytes of the first block on the drive, after three steps of a trained family."""
    given: dict[str, Any] = {"output": run, "sequence_length": 24, "tokens_per_step": 96, "host_memory": "4GiB"}
    options = headrace.Options(learning_rate=1e-2, device_memory=device_memory, **given)
    ids = torch.randint(1, 300, (4, 24), generator=torch.Generator().manual_seed(1))
    with Engine.open(model, options, seams=Seams(RowWire(ends=False))) as engine:
        losses = [engine.step({"input_ids": ids, "labels": ids.clone()}).loss for _ in range(3)]
        engine.save_pretrained(run.parent / f"{run.name}-out")
        stored = engine.store.manifest.units[1].weights.num_bytes
    return losses, tensors_of(run.parent / f"{run.name}-out"), stored


@pytest.mark.wide
def test_training_upon_ternary_weights_is_training_upon_what_they_stand_for(ternary: Any, tmp_path: Path) -> None:
    """Bit for bit, by way of the drive, and of a device; a frozen base has a fraction of the bytes there."""
    plain = decompress_model(ternary[0] / "out", tmp_path / "plain")
    losses, weights, dense = trained(plain, tmp_path / "upon-plain", None)
    assert losses[-1] < losses[0]
    for name, device_memory in (("host", None), ("device", "512MiB")):
        again, found, stored = trained(ternary[0] / "out", tmp_path / name, device_memory)
        assert again == losses
        assert stored < dense / 2
        for key in weights:
            assert torch.equal(weights[key], found[key]), f"{name}: {key}"
