"""Rows that the model writes itself: prompts in their turns, completions and rewards as tensors, and what is refused."""

import json
import math
import sys
from collections.abc import Callable, Sequence
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
from headrace.generate.passes.generator import Generator
from headrace.generate.uses.rollout_worker import DRAWING, opened
from headrace.losses import loss_of
from headrace.losses.grpo import Grpo
from headrace.model.seats.generation_keys import KEYS
from headrace.report.completions import CompletionsFile
from headrace.report.trainer_state import trainer_state
from headrace.runs import rollouts, train
from headrace.runs.open_rows import halved
from headrace.runs.rewards import reward_of
from headrace.runs.rollouts import Beside, Rollouts
from headrace.terms.errors import ConfigError, DataError
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.run_options import RunOptions

G, LENGTH = 2, 16
# Values that change what is drawn, or that cannot be computed at all.
SET = {
    "temperature": 0.1,
    "top_k": 1,
    "num_beams": 4,
    "min_new_tokens": 3,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": [9, 10],
    "bad_words_ids": [[11]],
    "forced_eos_token_id": 4,
    "sequence_bias": [[[12], -9.0]],
    "stop_strings": "a",
    "max_length": 3,
    "guidance_scale": 2.0,
    "num_return_sequences": 2,
}


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


def test_prompts_come_in_the_order_of_trls_sampler() -> None:
    """One generator of torch draws all epochs, from whatever position; a run that began before keeps its own."""
    dice = torch.Generator().manual_seed(7)
    orders = [torch.randperm(5, generator=dice).tolist() for _ in range(3)]
    batches = stream(rows=10, seed=7)
    assert [numbers(batches.next_batch()) for _ in orders] == orders
    for epoch in (2, 0, 1):
        batches.restore({"taken": 5 * epoch, "prompts": 5, "order": "randperm"})
        assert numbers(batches.next_batch()) == orders[epoch]
    batches.restore({"taken": 5, "prompts": 5})
    assert numbers(batches.next_batch()) == np.random.default_rng((7, 1)).permutation(5).tolist()
    assert "order" not in batches.state()


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
def notes() -> list[str]:
    """What a person was told."""
    return []


@pytest.fixture
def made(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rollouts]:
    """Return a function that makes rollouts whose completions of a row are so many tokens long as rows stand before it and one.

    `reward` is what `judge` does; or `functions` are a whole file, of which `names` judge.
    """

    def make(reward: str = "", text: Any = None, *, functions: str = "", names: Sequence[str] = ("judge",)) -> Rollouts:
        head = "def judge(prompts, completions, goal, **others):\n    "
        (tmp_path / "reward.py").write_text(functions or f"{head}{reward}\n")
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        given = {"model": model, "data": ["data.jsonl"], "loss": f"grpo:num_generations={G},max_completion_length=4"}
        judges = [f"{tmp_path / 'reward.py'}:{name}" for name in names]
        config = RunOptions.of(given | {"reward": judges, "host_memory": "4GiB"})
        loss = loss_of(config.loss)
        assert isinstance(loss, Grpo)
        monkeypatch.setattr(rollouts, "open_tokenizer", lambda *_: _Tokenizer())
        batches = stream(shuffle=False)
        if text is not None:
            batches.prompts = tuple(Prompt(each.ids, text, each.columns) for each in batches.prompts)
        of_trainer = {"max_steps": 9, "num_train_epochs": 1.0, "train_batch_size": 4}
        file = CompletionsFile(tmp_path / "completions.jsonl")
        beside = Beside(file, lambda: trainer_state([], **of_trainer), notes.append)
        found = Rollouts(config, batches, loss, _Engine(), tmp_path / "weights", beside)  # type: ignore[arg-type]
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


FUNCTIONS = """
import asyncio

started = []

def ids(prompts, completions, completion_ids, **more):
    return [len(each) for each in completion_ids]

def state(trainer_state, completions, **more):
    return [trainer_state.global_step + trainer_state.max_steps] * len(completions)

async def first(completions, **more):
    started.append("first")
    await asyncio.sleep(0)
    return [100.0 if "second" in started else 0.0] * len(completions)  # 0, if one waited for the other

async def second(completions, **more):
    started.append("second")
    return [200.0] * len(completions)

def few(completions, goal):
    return [1000 * each for each in goal]

def code(completions, **more):
    return [None] * len(completions)

def some(completion_ids, **more):
    return [None if len(each) == 1 else 0.5 for each in completion_ids]

def logs(completions, log_extra, log_metric, **more):
    log_extra("length", [len(each) for each in completions])
    log_metric("share", 0.25)
    log_metric("share", 0.75)
    return [1.0] * len(completions)

def short(log_extra, **more):
    log_extra("length", [1])
    return [0.0, 0.0]

def taken(log_metric, **more):
    log_metric("loss", 1.0)
    return [0.0, 0.0]

def asks(completions, solution, **more):
    return [0.0, 0.0]
"""


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["ids"], [1, 2]),
        (["state"], [16, 16]),
        (["first", "second"], [300, 300]),
        (["few"], [1000, 1000]),
        (["ids", "code"], [1, 2]),
        (["code"], [math.nan, math.nan]),
        (["some", "code"], [math.nan, 0.5]),
    ],
)
def test_functions_are_called_as_by_trl_and_none_is_left_out(
    names: list[str], expected: list[float], made: Callable[..., Rollouts], notes: list[str]
) -> None:
    rows = made(functions=FUNCTIONS, names=names)
    for _ in range(2):  # asynchronous ones keep their loop
        found = rows.rows(batch_of(1), lambda: False)
        assert found is not None
        assert found["rewards"].tolist() == pytest.approx(expected, nan_ok=True)
    assert len(notes) == any(map(math.isnan, expected)), "said once"
    rows.close()


def test_what_functions_log_goes_to_the_step_and_to_its_completions(made: Callable[..., Rollouts], tmp_path: Path) -> None:
    rows = made(functions=FUNCTIONS, names=["logs", "some"])
    rows.rows(batch_of(1), lambda: False)
    assert rows.figures == {"share": 0.5}
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    expected = {"step": 8, "prompt": "prompt 1"}
    assert lines == [
        {**expected, "completion": "9", "reward": 1.0, "length": 1},
        {**expected, "completion": "9 9", "reward": 1.5, "length": 3},
    ]


def test_a_resumed_run_drops_lines_of_steps_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    for step in (1, 2, 3):
        CompletionsFile(path, committed_steps=step).add(step, {"completion": ["a", "b"]})
    with path.open("a") as file:
        file.write('{"step": 3, "compl')
    CompletionsFile(path, committed_steps=2).add(3, {"completion": ["c"]})
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(each["step"], each["completion"]) for each in found] == [(1, "a"), (1, "b"), (2, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize(
    ("name", "words"),
    [("short", "log_extra: 'length' has 1 values, the step 2 completions"), ("taken", "'loss' is a figure of the run itself")],
)
def test_what_cannot_be_logged_ends_the_run_in_one_line(name: str, words: str, made: Callable[..., Rollouts]) -> None:
    with pytest.raises(DataError, match=words):
        made(functions=FUNCTIONS, names=[name]).rows(batch_of(1), lambda: False)


def test_an_argument_that_nothing_gives_is_refused_before_anything_is_generated(made: Callable[..., Rollouts]) -> None:
    with pytest.raises(ConfigError, match=r"asks takes solution, which nothing gives; it gets .*trainer_state.* \(goal\)"):
        made(functions=FUNCTIONS, names=["asks"])


def test_completions_that_nothing_judged_are_left_out_of_their_group() -> None:
    loss, none = Grpo(num_generations=3), math.nan
    rewards = torch.tensor([1.0, none, 4.0, none, none, 2.0, none, none, none, 1.0, 2.0, 6.0])
    found, _ = loss.advantages(rewards)
    scale = float(torch.tensor([1.0, 4.0]).std()) + 1e-4
    assert found.tolist() == pytest.approx([-1.5 / scale, 0, 1.5 / scale, *[0] * 6, *loss.advantages(rewards[-3:])[0].tolist()])
    log_probs = torch.zeros(12, 4, requires_grad=True)
    told = loss(log_probs, torch.ones(12, 4).bool(), {"rewards": rewards}).metrics
    known = rewards[~rewards.isnan()]
    assert float(told["reward"]) == pytest.approx(float(known.mean()))
    assert float(told["reward_std"]) == pytest.approx(float(known.std()))
    batch = Grpo(num_generations=3, scale_rewards="batch").advantages(rewards)[0]
    assert float(batch[2]) == pytest.approx(1.5 / (float(known.std()) + 1e-4))


def test_of_the_models_settings_only_tokens_act_on_what_is_drawn(tmp_path: Path) -> None:
    write_model(tmp_path)
    file = tmp_path / "model" / "generation_config.json"
    tokens = {"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}
    file.write_text(json.dumps(dict.fromkeys(KEYS, 0.5) | SET | tokens))
    answers = []
    for written in (json.loads(file.read_text()), tokens):
        file.write_text(json.dumps(written))
        options = GenerateOptions(host_memory="1GiB", compute_dtype="float32")
        with Generator.open(tmp_path / "model", options=options, opened=opened(None)) as generator:
            own = generator.model.settings(1, None, DRAWING | {"max_new_tokens": 4})["generation_config"]
            plain = generator.model.chain.model._get_logits_processor(own, 1, torch.zeros((1, 1)).long(), device="cpu")
            assert list(plain) == []
            assert {name: getattr(own, name) for name in tokens} == tokens
            answers.append(list(generator.generate([[7, 8]] * 4, seed=3, **DRAWING, max_new_tokens=8)))
    assert answers[0] == answers[1]
