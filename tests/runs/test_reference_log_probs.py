"""The reference's log-probabilities: made before the first step, once, and again only what a kill left out."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fakes import run_options

from headrace.data.batches.open_data import open_stream
from headrace.runs.evaluating import Evaluations
from headrace.runs.references import References, _File
from headrace.terms.errors import RunDirectoryError
from headrace.terms.options.run_options import RunOptions


class _Scorer:
    """Stands for an engine: counts the rows that it scores, and says of each the sum of its tokens."""

    def __init__(self, step_index: int = 0) -> None:
        self.step_index, self.rows = step_index, 0

    def log_probs(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self.rows += len(batch["input_ids"])
        return -(batch["input_ids"] * batch["attention_mask"]).sum(dim=1).double()


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Any]:
    given = run_options(tmp_path, max_steps=30, loss="dpo", packing=False, eval_split=0.2)
    rows = [{"prompt": f"water {n}", "chosen": f" flows {n}", "rejected": " stands"} for n in range(10)]
    Path(given["data"]).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fill(scorer: _Scorer, heed: Callable[[], bool] = lambda: False, **more: Any) -> tuple[References, int, Any]:
        config = RunOptions.of(given | more)
        stream = open_stream(config)
        references = References(config, stream)
        count = references.make(scorer, Evaluations(config, stream, 30), heed)  # type: ignore[arg-type]
        return references, count, stream

    return fill


def test_each_row_is_scored_once_and_found_again(made: Callable[..., Any]) -> None:
    references, count, stream = made(_Scorer())
    assert count == 20  # eight pairs to train, two held out
    batch = stream.next_batch()
    found = references.beside(batch)["reference_log_probs"]
    expected = -torch.from_numpy(batch.input_ids * batch.attention_mask).sum(dim=1).float()
    assert torch.equal(found, expected)
    again = _Scorer(step_index=7)
    assert made(again)[1] == again.rows == 0


def test_a_killed_process_goes_on_after_its_last_whole_record(made: Callable[..., Any], tmp_path: Path) -> None:
    turns = iter([False, False, *[True] * 100])
    assert made(_Scorer(), lambda: next(turns))[1] == 4
    (file,) = (path for path in (tmp_path / "cache" / "references").iterdir() if path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-7])  # the last record is half written
    references, count, stream = made(_Scorer())
    assert count == 18  # the batch of the lost record, and those that were not scored
    assert len(references.beside(stream.next_batch())["reference_log_probs"]) == 2


def test_after_a_step_nothing_is_made_that_is_missing(made: Callable[..., Any]) -> None:
    with pytest.raises(RunDirectoryError, match="after step 3"):
        made(_Scorer(step_index=3))


@pytest.mark.parametrize("more", [{"seed": 1}, {"tokens_per_step": 128}, {"shuffle": False}])
def test_rows_in_other_batches_are_scored_in_these(more: dict[str, Any], made: Callable[..., Any]) -> None:
    """A row's number has the bits of its step only in the batch of that step; held-out rows are always in theirs."""
    assert made(_Scorer())[1] == 20
    assert made(_Scorer(), **more)[1] >= 16  # a seed also decides what is held out
    assert made(_Scorer(), **more)[1] == 0


def test_a_run_that_began_with_an_earlier_version_keeps_its_numbers(
    made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _File.of_data
    monkeypatch.setattr(_File, "of_data", lambda *given: (found := files(*given)) and _File(found._earlier, found._earlier))
    made(_Scorer())  # as that version made them
    monkeypatch.setattr(_File, "of_data", files)
    references, count, stream = made(_Scorer(step_index=5))
    assert count == 0
    assert len(references.beside(stream.next_batch())["reference_log_probs"]) == 2
    assert made(_Scorer())[1] == 20, "a new run makes its own"
