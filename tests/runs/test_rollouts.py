"""Rows that the model writes itself: prompts in their turns, completions and rewards as tensors, and what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from node_processes import write_model

from headrace.data.batches.open_data import open_tokenizer
from headrace.data.batches.prompt_batches import Prompt, PromptBatches, read_prompts
from headrace.data.chat.prompts import Prompts
from headrace.data.values.values import Batch, DataSpec
from headrace.losses import loss_of
from headrace.losses.grpo import Grpo
from headrace.runs import rollouts, train
from headrace.runs.open_rows import halved
from headrace.runs.rewards import reward_of
from headrace.runs.rollouts import Rollouts
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.run_options import RunOptions

G, LENGTH = 2, 16


def stream(count: int = 5, rows: int = 4, **more: Any) -> PromptBatches:
    prompts = [Prompt((number + 1,) * (1 + number % 3), f"prompt {number}", {"goal": number}) for number in range(count)]
    spec = DataSpec(paths=("data",), sequence_length=LENGTH, tokens_per_step=rows * LENGTH, packing=False, **more)
    return PromptBatches(prompts, spec, G, 0)


def numbers(batch: Batch) -> list[int]:
    assert batch.samples is not None
    return batch.samples.tolist()


def test_each_prompt_has_its_turn_in_each_epoch_and_a_position_brings_back_what_followed() -> None:
    batches = stream()
    taken = [numbers(batches.next_batch()) for _ in range(5)]
    flat = [number for each in taken for number in each]
    assert sorted(flat[:5]) == sorted(flat[5:]) == [0, 1, 2, 3, 4]
    assert flat[:5] != flat[5:], "in another order"
    again = stream()
    for _ in range(2):
        again.next_batch()
    state = json.loads(json.dumps(again.state()))
    third = stream()
    third.restore(state)
    assert [numbers(third.next_batch()) for _ in range(3)] == taken[2:]
    with pytest.raises(DataError, match="6 prompts, and the run began with 5"):
        stream(6).restore(state)
    assert [numbers(each.next_batch()) for each in [stream(shuffle=False)] for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]
    assert (stream().steps_per_epoch, stream().epochs_ended(5)) == (2.5, 2)


def test_a_step_takes_whole_groups() -> None:
    with pytest.raises(ConfigError, match=r"3 rows of 16 tokens, no multiple of num_generations=2; give 32"):
        stream(rows=3)


class _Tokenizer:
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


class _Engine:
    step_index = 7

    def flush(self) -> None: ...


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rollouts]:
    """Return a function that makes rollouts whose completions of a row are `answer` tokens long."""

    def make(reward: str, text: Any = None) -> Rollouts:
        (tmp_path / "reward.py").write_text(f"def judge(prompts, completions, goal, **others):\n    {reward}\n")
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        given = {"model": model, "data": ["data.jsonl"], "loss": f"grpo:num_generations={G},max_completion_length=4"}
        config = RunOptions.of(given | {"reward": f"{tmp_path / 'reward.py'}:judge", "host_memory": "4GiB"})
        loss = loss_of(config.loss)
        assert isinstance(loss, Grpo)
        monkeypatch.setattr(rollouts, "open_tokenizer", lambda *_: _Tokenizer())
        batches = stream(shuffle=False)
        if text is not None:
            batches.prompts = tuple(Prompt(each.ids, text, each.columns) for each in batches.prompts)
        found = Rollouts(config, batches, loss, _Engine(), tmp_path / "weights")  # type: ignore[arg-type]
        monkeypatch.setattr(found, "_generated", lambda prompts, heed: [[9] * (1 + row) for row in range(len(prompts))])
        return found

    return make


def batch_of(*samples: int) -> Batch:
    nothing = np.zeros((0, 0), np.int64)
    return Batch(
        input_ids=nothing,
        labels=nothing,
        position_ids=None,
        attention_mask=None,
        token_mask=None,
        num_tokens=0,
        num_trained_tokens=0,
        samples=np.array(samples),
    )


def test_rows_are_prompts_and_completions_and_only_these_are_trained(made: Callable[..., Rollouts]) -> None:
    found = made("return [100 * g + len(c.split()) for g, c in zip(goal, completions)]").rows(batch_of(0, 2), lambda: False)
    assert found is not None
    assert found["input_ids"].tolist() == [
        [1, 9, 0, 0, 0, 0, 0],
        [1, 9, 9, 0, 0, 0, 0],
        [3, 3, 3, 9, 9, 9, 0],
        [3, 3, 3, 9, 9, 9, 9],
    ]
    trained = torch.where(found["labels"] == -100, 0, found["labels"])
    assert trained.tolist() == [
        [0, 9, 0, 0, 0, 0, 0],
        [0, 9, 9, 0, 0, 0, 0],
        [0, 0, 0, 9, 9, 9, 0],
        [0, 0, 0, 9, 9, 9, 9],
    ]
    assert torch.equal(found["attention_mask"], (found["input_ids"] != 0).long())
    assert found["rewards"].tolist() == [1, 2, 203, 204]


def test_a_conversation_is_rewarded_for_a_message(made: Callable[..., Rollouts]) -> None:
    text = [{"role": "user", "content": "?"}]
    check = "assert prompts[0][0]['role'] == 'user'; c = [each[0] for each in completions]; "
    check += "return [len(each['content']) * (each['role'] == 'assistant') for each in c]"
    found = made(check, text).rows(batch_of(0), lambda: False)
    assert found is not None
    assert found["rewards"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("return [0.0]", "a finite number for each of 2 completions, found 1 numbers"),
        ("return [0.0, float('nan')]", "a finite number for each of 2 completions, found nan"),
        ("raise KeyError('goal')", "KeyError: 'goal'"),
        ("return None", "TypeError"),
    ],
)
def test_a_reward_that_is_none_ends_the_run_in_one_line(reward: str, words: str, made: Callable[..., Rollouts]) -> None:
    with pytest.raises(DataError, match=words) as error:
        made(reward).rows(batch_of(1), lambda: False)
    assert "reward.py:judge" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_function_that_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("value = 3\n")
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    for text, words in (
        ("judge", "expected FILE.py:NAME"),
        (f"{tmp_path}/other.py:judge", "there is no such file"),
        (f"{file}:judge", "has no function judge"),
        (f"{file}:value", "has no function value"),
        (f"{broken}:judge", "no_such_module"),
    ):
        with pytest.raises(ConfigError, match=words):
            reward_of(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": "grpo"}, "loss: grpo needs a reward"),
        ({"reward": "own.py:judge"}, "reward: nothing takes it"),
        ({"loss": "grpo", "reward": "own.py:judge", "eval_split": 0.1}, "eval_split: a run whose model writes its own rows"),
        ({"loss": "grpo", "reward": "own.py:judge", "streaming": True, "max_steps": 2}, "streaming"),
        ({"loss": "grpo", "reward": "own.py:judge", "packing": True}, "packing"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        RunOptions.of({"model": tmp_path, "data": ["data.jsonl"], **given})


def test_a_file_imports_others_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("NUMBER = 3.0\n")
    (tmp_path / "own.py").write_text("from beside_it import NUMBER\ndef judge(**others):\n    return [NUMBER]\n")
    assert reward_of(f"{tmp_path}/own.py:judge")() == [3.0]
    assert str(tmp_path) not in sys.path


def test_a_function_that_is_not_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "water"}\n')
    given = {"model": tmp_path / "model", "data": [str(tmp_path / "prompts.jsonl")], "loss": "grpo", "reward": "no.py:judge"}
    with pytest.raises(ConfigError, match="there is no such file"):
        train(RunOptions.of({**given, "output": tmp_path / "run", "cache": tmp_path / "cache"}))
    assert not (tmp_path / "run").exists()


def test_a_text_is_taken_as_it_is_and_messages_get_the_template(tmp_path: Path) -> None:
    write_model(tmp_path)
    tokenizer = open_tokenizer(tmp_path / "model", None)
    tokenizer.chat_template = "{% for m in messages %}the {{ m['content'] }} {% endfor %}"
    (tmp_path / "p.jsonl").write_text('{"prompt": "water"}\n{"prompt": [{"role": "user", "content": "water"}]}\n')
    (text, chat), too_long = read_prompts([str(tmp_path / "p.jsonl")], tmp_path, Prompts(tokenizer, raw=True), 64)
    assert list(text.ids) == tokenizer("water")["input_ids"]
    assert list(chat.ids) == tokenizer("the water ", add_special_tokens=False)["input_ids"]
    assert too_long == 0
    with pytest.raises(DataError, match=rf"all 2 prompts are too long: the shortest has {len(text.ids)} tokens.* room for 0"):
        read_prompts([str(tmp_path / "p.jsonl")], tmp_path, Prompts(tokenizer, raw=True), 0)


def test_engine_and_generator_have_half_of_the_memory_each(tmp_path: Path) -> None:
    config = RunOptions.of({"model": tmp_path, "data": ["d.jsonl"], "host_memory": "6GiB", "device_memory": "2GiB"})
    assert (halved(config).host_memory, halved(config).device_memory) == (3 << 30, 1 << 30)
    assert 0 < int(halved(RunOptions.of({"model": tmp_path, "data": ["d.jsonl"]})).host_memory or 0) < 1 << 50
