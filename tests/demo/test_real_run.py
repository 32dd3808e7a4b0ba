"""What the demo on a real model trains on, and how many steps it takes."""

from pathlib import Path
from typing import Any

import pytest
import python_docs
import real_run
from python_docs import ASKED
from real_model import NoRealModel
from real_run import LEAST_STEPS, LEAST_TOKENS, MOST_TOKENS, RealRun
from stage import Places


def test_no_docstring_is_trained_on_and_held_out() -> None:
    trained, held_out = python_docs.python_docs()
    assert len(trained) > 500
    assert len(held_out) > real_run.HELD_OUT
    assert held_out[0].name == ASKED
    for part in (lambda sample: sample.name, lambda sample: sample.answer):
        assert not {part(sample) for sample in trained} & {part(sample) for sample in held_out}
        assert len({part(sample) for sample in trained}) == len(trained)


def test_the_samples_are_the_same_each_time() -> None:
    assert python_docs.python_docs() == python_docs.python_docs()


def test_a_sample_is_a_question_and_its_docstring(tmp_path: Path) -> None:
    _, held_out = python_docs.python_docs()
    python_docs.write(tmp_path / "docs.jsonl", held_out[:1])
    assert (tmp_path / "docs.jsonl").read_text() == (
        '{"messages": [{"role": "user", "content": "What does textwrap.dedent do in Python?"}, '
        '{"role": "assistant", "content": "Remove any common leading whitespace from every line in `text`."}]}\n'
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealRun:
    """A run whose planner takes a hundredth of a second a token, and 111 steps for one pass."""
    monkeypatch.setattr(real_run, "run_headrace", lambda *_: 0)
    return plans(RealRun(Places(tmp_path)), monkeypatch, seconds_per_token=0.01)


def plans(run: RealRun, monkeypatch: pytest.MonkeyPatch, *, seconds_per_token: float, least_mib: int = 900) -> RealRun:
    def answer(*arguments: str) -> dict[str, Any]:
        tokens = int(arguments[arguments.index("--tokens-per-step") + 1])
        mebibytes = int(arguments[arguments.index("--host-memory") + 1].removesuffix("MiB"))
        return {
            "fits": mebibytes >= least_mib,
            "reason": f"host memory: at least {least_mib} MiB are needed, {mebibytes} MiB are allowed",
            "step_seconds": tokens * seconds_per_token,
            "tokens_per_step": tokens,
            "num_steps": 111 * MOST_TOKENS // tokens,
        }

    monkeypatch.setattr(real_run, "answer_of", answer)
    return run


@pytest.mark.parametrize(
    ("seconds_per_token", "steps", "tokens"),
    [
        (0.00001, 111, MOST_TOKENS),  # one pass over the data
        (0.003, 32, MOST_TOKENS),  # what goes into the time
        (0.007, LEAST_STEPS, MOST_TOKENS),
        (0.014, LEAST_STEPS, MOST_TOKENS // 2),
        (0.1, LEAST_STEPS, LEAST_TOKENS),
        (10.0, LEAST_STEPS, LEAST_TOKENS),
    ],
)
def test_the_forecast_decides_the_steps(
    seconds_per_token: float, steps: int, tokens: int, run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans(run, monkeypatch, seconds_per_token=seconds_per_token)
    run.choose_steps()
    assert (run.steps, run.tokens_per_step) == (steps, tokens)


def test_more_memory_is_taken_where_it_is_needed(run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.choose_steps()
    assert run.host_memory == "1024MiB"
    plans(run, monkeypatch, seconds_per_token=0.01, least_mib=2000).choose_steps()
    assert run.host_memory == "2200MiB"


def test_a_machine_without_room_gets_the_made_model(run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_run, "answer_of", lambda *_: {"fits": False, "reason": "ssd: 3 GiB are needed, 1 GiB is free"})
    with pytest.raises(NoRealModel, match="ssd: 3 GiB"):
        run.choose_steps()


def test_the_model_is_asked_by_headrace(run: RealRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(real_run, "text_of", lambda *words: told.append(words) or "It removes\nmargins.\n")
    monkeypatch.setattr(real_run, "answer_of", lambda *words: told.append(words) or {"loss": 2.5})
    asked = run.ask_before()
    assert asked == real_run.Asked("It removes margins.", 2.5)
    assert [words[:2] for words in told] == [("generate", str(run.model)), ("eval", str(run.model))]
    assert run.asked.question in told[0]
    assert (run.unseen).read_text(encoding="utf-8").count("\n") == real_run.HELD_OUT
    assert str(run.unseen) in told[1]
