"""What a compression spares of its passes changes no byte: a look at one row, and passes that end at the last wanted input."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import files_of, run, write_model
from tiers import sampled

from headrace.compress import verbs
from headrace.model.chain.caught import CatchInputs


def whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "times_of_each_token", lambda *given: {})


@pytest.mark.parametrize("kind", sampled(["llama", "phi3", "mixtral"]))
def test_files_are_those_of_whole_passes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model", kind, **({"pad_token_id": 0} if kind == "phi3" else {}))
    rows: list[int] = []
    noted = CatchInputs._note_product

    def note(self: CatchInputs, inputs: torch.Tensor, weight: torch.Tensor) -> None:
        rows.append(inputs.numel() // inputs.shape[-1])
        noted(self, inputs, weight)

    monkeypatch.setattr(CatchInputs, "_note_product", note)
    more: dict[str, Any] = {"sequence_length": 32, "group_size": 32}
    run(model, tmp_path / "short", **more)
    assert min(rows) <= 32, "a look at one row"
    with monkeypatch.context() as patch:
        whole_passes(patch)
        run(model, tmp_path / "whole", **more)
    assert files_of(tmp_path / "short") == files_of(tmp_path / "whole")


def test_the_last_product_of_a_block_is_computed_only_where_rows_pass_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where a matrix of the block's last module really multiplies."""
    counted: list[int] = []

    def products(folder: str) -> int:
        counted.clear()
        run(model, tmp_path / folder, sequence_length=32, group_size=32)
        return len(counted)

    linear = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        out = linear(self, inputs)
        if self.in_features == 96:  # of SIZES, the matrix behind the products of gate and up
            counted.append(1)
        return out

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    model = write_model(tmp_path / "model")
    short = products("short")
    with monkeypatch.context() as patch:
        whole_passes(patch)
        whole = products("whole")
    assert short < whole


def test_a_row_that_misses_matrices_is_followed_by_a_whole_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As experts that are modules of their own, where one row asks for few of them."""
    model = write_model(tmp_path / "model")
    looked: list[int] = []
    of_rows = CatchInputs.of_rows

    def noted(self: CatchInputs, counts: torch.Tensor) -> CatchInputs:
        own = of_rows(self, counts)
        if not self.wanted:
            looked.append(counts.numel())
            if len(looked) == 1:
                own._matrices = dict(list(own._matrices.items())[:-1])
        return own

    monkeypatch.setattr(CatchInputs, "of_rows", noted)
    run(model, tmp_path / "run", sequence_length=32, group_size=32)
    assert looked == [32, looked[1], 32, 32], "three blocks, and one look more"
    assert looked[1] > 32
