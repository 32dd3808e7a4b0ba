"""Tasks of lm-eval have the scores of its own `hf` model, in which transformers computes; a task's data are files here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from headrace.integrations.lm_eval import HeadraceLM  # noqa: E402

WORDS = ("water", "turbine", "w", "and", "water and", "the weir", "a gate")
KINDS = {
    "rivers": {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"},
    "endings": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["w"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a task of each kind, over one file."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [
        {
            "text": "water and turbine " * (1 + each),
            "choices": [WORDS[each % 7], WORDS[(each + 2) % 7], WORDS[(each + 3) % 7]],
            "label": each % 3,
            "answer": WORDS[each % 7],
        }
        for each in range(9)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, kind in KINDS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
            "test_split": "test",
            "doc_to_text": "" if name == "texts" else "{{text}}",
            **kind,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    "memory", [["--rows", "2"], pytest.param(["--device-memory", "64MiB", "--seats", "2"], marks=pytest.mark.deep)]
)
def test_scores_are_those_of_lm_evals_own_model(memory: list[str], talking: Path, tasks: Path, capsys: Any) -> None:
    asked = ["--tasks", ",".join(KINDS), "--include-path", str(tasks), "--compute-dtype", "float32", "--num-fewshot", "0"]
    with pytest.raises(SystemExit) as left:
        main(["eval", str(talking), *asked, "--host-memory", "4GiB", *memory, "--json"])
    assert not left.value.code
    found = json.loads(capsys.readouterr().out)
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=str(talking), dtype="float32", device="cpu", batch_size=3, logits_cache=False),
        tasks=list(KINDS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        num_fewshot=0,
    )
    for name in KINDS:
        ours, own = (
            {key: value for key, value in each[name].items() if "," in key} for each in (found["results"], theirs["results"])
        )
        assert ours.keys() == own.keys()
        for key, value in own.items():
            assert ours[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), (name, key)
    assert found["bytes_read"] > 0


def test_log_likelihoods_are_those_of_lm_evals_own_model(talking: Path) -> None:
    """Of empty contexts, of rows that are cut, of the same row twice, of a text in several windows."""
    pairs = [
        ("", "water"),
        ("water", " and"),
        ("turbine and " * 40, "water"),
        ("water", " and"),
        ("w ", "x"),
        ("water a", "nd"),
    ]
    rolling = [("water and turbine " * 30,), ("w",)]
    theirs = HFLM(
        pretrained=str(talking), dtype="float32", device="cpu", max_length=48, logits_cache=False
    )  # their cache takes wrong places
    with HeadraceLM(talking, max_length=48, compute_dtype="float32", host_memory="4GiB") as ours:
        assert (ours.eot_token_id, ours.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)
        for (score, greedy), (own, also) in zip(
            *(_asked(each.loglikelihood, "loglikelihood", pairs) for each in (ours, theirs)), strict=True
        ):
            assert score == pytest.approx(own, rel=2e-6)
            assert greedy == also
        found, own = (_asked(each.loglikelihood_rolling, "loglikelihood_rolling", rolling) for each in (ours, theirs))
        assert found == pytest.approx(own, rel=2e-6)
        assert ours.loglikelihood([]) == []


def _asked(call: Callable[[Any], Any], kind: str, arguments: list[tuple[str, ...]]) -> Any:
    return call([Instance(kind, {}, given, index) for index, given in enumerate(arguments)])


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["--tasks", "no_such_task"], "lm-eval knows no no_such_task", marks=pytest.mark.deep),  # reads all tasks
        (["--tasks", "rivers", "--data", "x.jsonl"], "not both"),
        ([], "--data FILE or --tasks NAMES"),
        (["--data", "x.jsonl", "--limit", "3"], "limit: is for tasks"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, talking: Path, tasks: Path, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "water"}\n')
    with pytest.raises(SystemExit) as left:
        main(["eval", str(talking), *words, *(["--include-path", str(tasks)] if "--tasks" in words else [])])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
