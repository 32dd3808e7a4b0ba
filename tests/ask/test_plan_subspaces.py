"""What `headrace plan` says of subspaces in place of whole gradients: seconds, bytes, and what is trained as it is."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from headrace.ask.answer import plan_model
from headrace.ask.plan_report import PlanReport
from headrace.terms.lanes import Lane
from headrace.terms.options.options import Options

SEVEN = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}


def report(tmp_path: Path, shape: dict[str, Any], **options: Any) -> PlanReport:
    tmp_path.mkdir(exist_ok=True)
    LlamaConfig(**shape, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16").save_pretrained(tmp_path)
    return plan_model(tmp_path, Options(machine="rtx4090-1ssd", **options), here=False)


@pytest.mark.wide
def test_what_is_written_are_subspaces_and_what_is_trained_as_it_is(tmp_path: Path) -> None:
    found = report(tmp_path, SMALL, gradient="lsp:dimension=128", sequence_length=128, tokens_per_step=1024)
    assert found.plan is not None
    assert found.forecast is not None
    matrices = 4 * (4 * 512 * 512 + 3 * 512 * 1408)
    rest = found.parameters - matrices
    core = 4 * 7 * 128 * 128
    # 12 bytes of each number, and of the embedding and the head of which the weights are half of the master.
    assert found.forecast.ssd_bytes_written_per_step == pytest.approx(12 * (core + rest), rel=0.03)
    (note,) = (note for note in found.plan.results.notes if note.startswith("gradient:"))
    assert f"{100 * rest / found.parameters:.1f}" in note


@pytest.mark.deep
def test_seven_billion_with_one_ssd_are_limited_by_compute_where_whole_gradients_are_by_the_ssd(tmp_path: Path) -> None:
    common = {"host_memory": "32GiB", "sequence_length": 2048, "tokens_per_step": 16384}
    whole = report(tmp_path / "whole", SEVEN, **common).forecast
    assert whole is not None
    assert whole.bottleneck in (Lane.SSD_READ, Lane.SSD_WRITE)
    subspaces = report(tmp_path / "lsp", SEVEN, gradient="lsp:dimension=1024", **common).forecast
    assert subspaces is not None
    assert subspaces.utilisation[Lane.COMPUTE] > 1 / 1.1


@pytest.mark.wide
def test_subspaces_are_half_as_wide_as_matrices_where_host_memory_holds_their_states_and_else_a_quarter(tmp_path: Path) -> None:
    common: dict[str, Any] = {"gradient": "lsp", "sequence_length": 32, "tokens_per_step": 64, "train": "matrices"}
    shape = SMALL | {"num_hidden_layers": 2, "vocab_size": 512}

    def side(host_memory: int) -> float:
        plan = report(tmp_path, shape, host_memory=host_memory, **common).plan
        assert plan is not None
        (side,) = (found[1] for note in plan.results.notes if (found := re.search(r"of side (\d+) have", note)))
        assert plan.units[1].gradient_elements == pytest.approx(7 * int(side) ** 2, rel=0.02)
        return int(side)

    least = report(tmp_path, shape, host_memory=1 << 20, **common).needed_bytes["host"]
    assert (side(8 << 30), side(least)) == (256, 128)
