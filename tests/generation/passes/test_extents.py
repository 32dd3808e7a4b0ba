"""Weights that are read where they lie are those that an import reads, whatever dtypes and experts the files hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from saved_models import save
from tiers import sampled

from headrace.generate.passes.sources import ShardSource
from headrace.machine.host_memory import huge_page_buffer
from headrace.model import Chain, Checkpoint, import_unit
from headrace.terms.options.optimizer import Optimizer

CASES = [
    ("llama", "bfloat16", "bfloat16"),
    ("llama", "bfloat16", "float32"),
    ("gpt2", "float32", "float32"),
    ("mixtral", "float32", "float32"),
    ("dbrx", "bfloat16", "bfloat16"),
    ("nemotron-h", "float16", "float32"),
]


@pytest.mark.parametrize(("name", "stored", "dtype"), sampled(CASES, CASES))
def test_weights_in_place_are_those_of_an_import(name: str, stored: str, dtype: str, tmp_path: Path) -> None:
    directory, _ = save(tmp_path, name, stored, max_shard_size="20KB")
    chain = Chain.from_config(Checkpoint.open(directory).config, dtype, Optimizer())
    weights = chain.attach(Checkpoint.open(directory))
    source = ShardSource(chain, weights, lambda event: None, on_cpu=True)
    try:
        for unit, (plain, layout) in enumerate(zip(chain.layouts, source.layouts, strict=True)):
            expected = np.zeros(plain.num_elements, np.uint16 if dtype == "bfloat16" else np.float32)
            import_unit(weights, plain, expected, None)
            found = _read(source, unit, chain.dtype)
            for one, other in zip(plain.parameters, layout.parameters, strict=True):
                ours = found[other.offset : other.offset + other.num_elements]
                assert np.array_equal(ours, expected[one.offset : one.offset + one.num_elements]), other.name
    finally:
        source.close()


def _read(source: ShardSource, unit: int, dtype: torch.dtype) -> np.ndarray:
    figures = source.figures[unit]
    slot_bytes = figures.num_elements * dtype.itemsize
    stored = huge_page_buffer(figures.stored_bytes or slot_bytes)
    source.read(unit, stored)
    into = torch.from_numpy(stored).view(dtype)
    if figures.is_made:
        into = torch.zeros(figures.num_elements, dtype=dtype)
        source.make(unit, torch.from_numpy(stored), None, into)
    return into.view(torch.int16).numpy().view(np.uint16) if dtype is torch.bfloat16 else into.numpy()


def test_a_model_behind_links_is_read(directory_of: Callable[..., Path], tmp_path: Path) -> None:
    directory = directory_of("llama")
    for path in directory.iterdir():
        (tmp_path / path.name).symlink_to(path)
    chain = Chain.from_config(Checkpoint.open(tmp_path).config, "float32", Optimizer())
    source = ShardSource(chain, chain.attach(Checkpoint.open(tmp_path)), lambda event: None, on_cpu=True)
    try:
        assert np.isfinite(_read(source, 1, torch.float32)).all()
    finally:
        source.close()
