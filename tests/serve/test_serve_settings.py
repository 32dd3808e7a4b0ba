"""Settings of requests: log-probabilities, penalties, biases, several answers and prompts, beside plain transformers.

Run: pytest tests/serve
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 8}


@cache
def plain(model: Path) -> Any:
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for parameter in found.parameters():
        parameter.data = parameter.data.clone()
    return found


def logits_of(model: Path, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return plain(model)(torch.tensor([ids])).logits[0].double()


def ids_of(model: Path, text: str) -> list[int]:
    return AutoTokenizer.from_pretrained(model)(text).input_ids


def greedy(model: Path, ids: list[int], count: int, change: Any) -> list[int]:
    """Return greedy tokens, each of logits that `change` has changed: plain loops over the whole row."""
    found = list[int]()
    for _ in range(count):
        logits = logits_of(model, ids + found)[-1]
        found.append(int(change(logits, ids, found).argmax()))
    return found


STEERED: dict[str, tuple[dict[str, Any], Any]] = {
    "frequency": (
        {"frequency_penalty": 1.5},
        lambda own, ids, new: own - 1.5 * torch.bincount(torch.tensor(new, dtype=torch.int64), minlength=320),
    ),
    "presence": (
        {"presence_penalty": 2},
        lambda own, ids, new: own - 2.0 * (torch.bincount(torch.tensor(new, dtype=torch.int64), minlength=320) > 0),
    ),
    "repetition": (
        {"repetition_penalty": 1.7},
        lambda own, ids, new: torch.where(
            torch.isin(torch.arange(320), torch.tensor(ids + new)), torch.where(own > 0, own / 1.7, own * 1.7), own
        ),
    ),
    "bias": (
        {"logit_bias": {"5": 100, "6": 99.5, "7": -100}},
        lambda own, ids, new: own + torch.tensor([0.0] * 5 + [100, 99.5, -100] + [0.0] * 312),
    ),
}


@pytest.mark.parametrize("name", STEERED)
def test_scores_are_steered_as_by_plain_loops_and_noted_before(server: Server, model: Path, name: str) -> None:
    asked, change = STEERED[name]
    ids = ids_of(model, "water flows")
    tokens = greedy(model, ids, 8, change)
    if 0 in tokens:
        tokens = tokens[: tokens.index(0) + 1]
    found = server.post(TEXTS, prompt=ids, **GREEDY, **asked, logprobs=3).json()["choices"][0]
    words = AutoTokenizer.from_pretrained(model).decode
    assert found["logprobs"]["tokens"] == [words([token]) for token in tokens]
    assert tokens != greedy(model, ids, 8, lambda own, *_: own)[: len(tokens)], "it changes something"
    logits = logits_of(model, ids + tokens).log_softmax(-1)
    own = [float(logits[len(ids) - 1 + place, token]) for place, token in enumerate(tokens)]
    assert found["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-4)
    best = logits[len(ids) - 1].topk(3)
    pairs = [*zip(best.indices.tolist(), best.values.tolist(), strict=True), (tokens[0], own[0])]
    expected = {words([token]): value for token, value in sorted(pairs, key=lambda pair: pair[1])}
    assert found["logprobs"]["top_logprobs"][0] == pytest.approx(expected, abs=1e-4)
    offsets = found["logprobs"]["text_offset"]
    assert offsets == [sum(len(each) for each in found["logprobs"]["tokens"][:place]) for place in range(len(tokens))]


@pytest.mark.parametrize("new", [0, 1, 4])
def test_a_prompt_is_scored(server: Server, model: Path, new: int) -> None:
    """As lm-eval asks: the text again, with log-probabilities of all its tokens but the first."""
    ids = ids_of(model, "the turbine turns, and water flows downhill")
    found = server.post(TEXTS, prompt=[ids, ids[:5]], temperature=0, max_tokens=new, logprobs=1, echo=True, seed=1).json()
    words = AutoTokenizer.from_pretrained(model).decode
    for choice, row in zip(found["choices"], (ids, ids[:5]), strict=True):
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(words(row))
        assert len(logprobs["tokens"]) == len(row) + new
        expected = logits_of(model, row).log_softmax(-1)
        own = [float(expected[place, token]) for place, token in enumerate(row[1:])]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(row)] == pytest.approx(own, abs=1e-4)
        firsts = [
            each == max(top.values())
            for each, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
            if top
        ]
        assert firsts[: len(row) - 1] == [int(expected[place].argmax()) == token for place, token in enumerate(row[1:])]
    assert found["usage"] == {
        "prompt_tokens": len(ids) + 5,
        "completion_tokens": 2 * new,
        "total_tokens": len(ids) + 5 + 2 * new,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_prompt_logprobs_have_ranks(server: Server, model: Path) -> None:
    found = server.post(CHATS, messages=[{"role": "user", "content": "water"}], max_tokens=3, prompt_logprobs=2).json()
    ids = AutoTokenizer.from_pretrained(model).apply_chat_template(
        [{"role": "user", "content": "water"}], add_generation_prompt=True, return_dict=False
    )
    logits = logits_of(model, ids)
    first, *others = found["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids) - 1
    for place, (entry, token) in enumerate(zip(others, ids[1:], strict=True)):
        rank = int((logits[place] > logits[place, token]).sum()) + 1
        assert entry[str(token)]["rank"] == rank
        assert set(entry) == {str(each) for each in (*logits[place].topk(2).indices.tolist(), token)}


def test_several_answers_are_those_of_their_seeds(server: Server) -> None:
    asked = {"temperature": 1.0, "max_tokens": 10}
    for path, prompt in ((TEXTS, {"prompt": ["water", "flows"]}), (CHATS, {"messages": [{"role": "user", "content": "w"}]})):
        many = server.post(path, **prompt, **asked, seed=5, n=2).json()
        assert [choice["index"] for choice in many["choices"]] == list(range(len(many["choices"])))
        for choice in many["choices"]:
            place, number = divmod(choice["index"], 2)
            one = {"prompt": prompt["prompt"][place]} if path == TEXTS else prompt
            alone = server.post(path, **one, **asked, seed=5 + number).json()["choices"][0]
            assert alone == {**choice, "index": 0}
        assert len({json.dumps({**choice, "index": 0}) for choice in many["choices"]}) > 1


def test_streams_of_several_answers_have_what_the_whole_ones_have(server: Server) -> None:
    asked = {
        "model": "tiny",
        "prompt": ["water", "flows"],
        "n": 2,
        "max_tokens": 9,
        "seed": 3,
        "temperature": 1.0,
        "logprobs": 2,
        "echo": True,
    }
    whole = server.client.completions.create(**asked)
    texts, tokens = [""] * 4, [list[Any]() for _ in range(4)]
    for event in server.client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += zip(
                choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.text_offset, strict=True
            )
    assert texts == [choice.text for choice in whole.choices]
    for choice, found in zip(whole.choices, tokens, strict=True):
        told = choice.logprobs
        assert found == list(zip(told.tokens, told.token_logprobs, told.text_offset, strict=True))
    assert event.usage == whole.usage


def test_a_chat_tells_of_its_tokens(server: Server) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "w"}],
        "max_tokens": 6,
        "seed": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    found = server.client.chat.completions.create(**asked).choices[0]
    content = found.logprobs.content
    assert "".join(each.token for each in content).removesuffix("<eos>") == found.message.content
    assert all(len(each.top_logprobs) == 2 and bytes(each.bytes).decode() == each.token for each in content)
    streamed = [
        each
        for event in server.client.chat.completions.create(**asked, stream=True)
        for each in (event.choices[0].logprobs.content if event.choices[0].logprobs else [])
    ]
    assert [each.logprob for each in streamed] == [each.logprob for each in content]


def test_tokens_stop_and_times_are_told(server: Server) -> None:
    plain = server.post(TEXTS, prompt="water", **GREEDY, logprobs=0, timings_per_token=True).json()
    timings = plain["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (
        plain["usage"]["prompt_tokens"],
        plain["usage"]["completion_tokens"],
    )
    assert timings["prompt_ms"] > 0
    assert timings["predicted_per_second"] > 0
    token = 5
    stopped = server.post(TEXTS, prompt="water", **GREEDY, logit_bias={str(token): 100}, stop_token_ids=[token]).json()
    assert stopped["usage"]["completion_tokens"] == 1
    assert stopped["choices"][0]["finish_reason"] == "stop"


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "too many answers": (TEXTS, {"prompt": "w", "n": 9}, "--max-requests"),
    "too many of several": (TEXTS, {"prompt": ["w"] * 5, "n": 2}, "--max-requests"),
    "no answer": (TEXTS, {"prompt": "w", "n": 0}, "n: expected"),
    "more than the likeliest": (TEXTS, {"prompt": "w", "logprobs": 21}, "logprobs: expected"),
    "likeliest of a prompt": (TEXTS, {"prompt": "w", "prompt_logprobs": 21}, "prompt_logprobs: expected"),
    "a prompt's in a stream": (TEXTS, {"prompt": "w", "prompt_logprobs": 1, "stream": True}, "whole answers"),
    "logprobs of a chat": (CHATS, {"logprobs": 3}, "logprobs must be"),
    "top_logprobs alone": (CHATS, {"top_logprobs": 3}, "beside logprobs"),
    "a penalty": (CHATS, {"frequency_penalty": 2.5}, "frequency_penalty"),
    "another penalty": (CHATS, {"presence_penalty": "x"}, "presence_penalty"),
    "a bias": (CHATS, {"logit_bias": {"5": 101}}, "logit_bias.5"),
    "a bias of no token": (CHATS, {"logit_bias": {"x": 1}}, "logit_bias"),
    "a bias of another token": (CHATS, {"logit_bias": {"320": 1}}, "logit_bias has token 320"),
    "many biases": (CHATS, {"logit_bias": {str(each): 1 for each in range(1025)}}, "1024"),
    "stops": (CHATS, {"stop_token_ids": [320]}, "stop_token_ids has token 320"),
    "an echo of a chat": (CHATS, {"echo": True}, "echo"),
    "no new token": (TEXTS, {"prompt": "w", "max_tokens": 0}, "max_new_tokens"),
    "min_p": (TEXTS, {"prompt": "w", "min_p": 2}, "min_p"),
    "prompts": (TEXTS, {"prompt": ["w", 3]}, "prompt must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_beyond_its_bounds_is_refused(server: Server, name: str) -> None:
    path, body, words = WRONG[name]
    found = server.post(path, **({"messages": [{"role": "user", "content": "w"}]} if path == CHATS else {}), **body)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]
