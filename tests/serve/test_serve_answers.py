"""A server's answers are those of `generate` alone, in the forms of OpenAI's API.

Run: pytest tests/serve
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from served import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ["water", "w", "the turbine turns", "flows downhill and on", "a b c d e f", "headrace"]
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def stock(model: Path, text: str, *, chat: bool, new: int, seed: int, **settings: Any) -> tuple[str, int]:
    """Return the text and the number of tokens that transformers itself generates from the prompt alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if chat:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(text, return_tensors="pt")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for parameter in plain.parameters():
        parameter.data = parameter.data.clone()  # as loaded they lie at borders that change float32 sums
    given = {"do_sample": True, "top_k": 50, **settings} if settings else {"do_sample": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        found = plain.generate(**ids, max_new_tokens=new, pad_token_id=0, **given)
    tokens = found[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True), len(tokens)


def test_requests_served_together_get_what_generate_gives_each_alone(server: Server, model: Path) -> None:
    """Six requests on three seats: some enter while others decode, each with its own settings, seed and length."""

    def asked(number: int) -> tuple[str, int]:
        settings = SAMPLED if number % 2 else {"temperature": 0}
        text, more = TEXTS[number], {"max_tokens": 12 + 5 * number, "seed": number, **settings}
        if number % 3:
            whole = server.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": text}], **more)
            found = whole.choices[0].message.content
        else:
            whole = server.client.completions.create(model="tiny", prompt=text, **more)
            found = whole.choices[0].text
        return found, whole.usage.completion_tokens

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(asked, range(6)))
    for number, answer in enumerate(found):
        settings = SAMPLED if number % 2 else {}
        expected = stock(model, TEXTS[number], chat=number % 3 > 0, new=12 + 5 * number, seed=number, **settings)
        assert answer == expected, number


@pytest.mark.parametrize("stop", [None, "e", ["t", "u"]])
def test_a_stream_has_the_text_of_the_whole_answer(server: Server, stop: Any) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "water"}], "max_tokens": 40, "seed": 7, **SAMPLED}
    whole = server.client.chat.completions.create(**asked, stop=stop)
    events = list(
        server.client.chat.completions.create(**asked, stop=stop, stream=True, stream_options={"include_usage": True})
    )
    pieces = [event.choices[0].delta.content or "" for event in events[:-1]]
    assert "".join(pieces) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert events[-1].usage == whole.usage
    assert {event.id for event in events} == {events[0].id}
    if stop is not None:
        assert not any(each in "".join(pieces) for each in stop)


def test_a_stream_comes_while_it_is_generated(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "w"}], "max_tokens": 60, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=asked) as found:
        lines = (line for line in found.iter_lines() if line)
        with server.passes.held():
            assert found.status_code == 200
            assert next(lines).startswith("data: {")
            assert server.figure("headrace_running") == 1
        *_, end, last = lines
    assert json.loads(end.removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")
    assert last == "data: [DONE]"


def test_tokens_are_taken_as_a_prompt(server: Server, model: Path) -> None:
    ids = AutoTokenizer.from_pretrained(model)("water").input_ids
    by_text = server.post("/v1/completions", prompt="water", max_tokens=9, temperature=0).json()
    by_ids = server.post("/v1/completions", prompt=[ids], max_tokens=9, temperature=0).json()
    assert by_text["choices"] == by_ids["choices"]
    counts = {"prompt_tokens": len(ids), "completion_tokens": 9, "total_tokens": len(ids) + 9}
    assert by_text["usage"] == by_ids["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_an_answer_tells_its_seed(server: Server) -> None:
    """Without one in the request, each is drawn with its own; asked for again it gives the same text."""
    asked = {"prompt": "water", "max_tokens": 16, **SAMPLED}
    first, other = (server.post("/v1/completions", **asked).json() for _ in range(2))
    assert first["seed"] != other["seed"]
    assert server.post("/v1/completions", **asked, seed=first["seed"]).json()["choices"] == first["choices"]


def test_the_model_is_listed_alone(server: Server) -> None:
    assert [each.id for each in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    assert server.http.get("/v1/models/other").status_code == 404
    assert server.http.get("/health").json() == {"status": "ok"}
