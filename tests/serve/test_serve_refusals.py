"""Whatever a client sends or does, it gets a JSON error with a status of its own, and nobody else loses an answer."""

import contextlib
import json
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Serve, Server, serving
from transformers import AutoTokenizer

from headrace.data.chat.prompts import Prompts
from headrace.data.chat.request_keys import NEUTRAL
from headrace.serve import desk
from headrace.serve.reading import GenerationRequest, Limits, Refused, RequestReader
from headrace.serve.shapes import CHAT, TEXT
from headrace.serve.tools.asking import Asking
from headrace.terms.errors import ConfigError, PlanInfeasible

CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "water"}]
# A path, a body, the status, and a word of the message.
REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "another model": (TEXTS, {"model": "gpt", "prompt": "w"}, 404, "'tiny'"),
    "no prompt": (TEXTS, {"model": "tiny"}, 400, "prompt"),
    "an empty prompt": (TEXTS, {"prompt": ""}, 400, "empty"),
    "half a character": (TEXTS, {"prompt": "w \ud83d"}, 400, "half a character"),
    "tokens that are none": (TEXTS, {"prompt": [1, 400]}, 400, "token 400"),
    "tokens below zero": (TEXTS, {"prompt": [-1]}, 400, "token -1"),
    "a prompt for a chat": (CHATS, {"prompt": "w"}, 400, "messages"),
    "no messages": (CHATS, {"messages": []}, 400, "messages"),
    "messages that are texts": (CHATS, {"messages": ["w"]}, 400, "messages"),
    "a picture": (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    "another way": (CHATS, {"messages": TALK, "use_beam_search": True}, 400, "use_beam_search"),
    "an unknown key": (CHATS, {"messages": TALK, "colour": "red"}, 400, "colour"),
    "a temperature below zero": (CHATS, {"messages": TALK, "temperature": -1}, 400, "temperature"),
    "a top_p above one": (CHATS, {"messages": TALK, "top_p": 2}, 400, "top_p"),
    "no new token": (CHATS, {"messages": TALK, "max_tokens": 0}, 400, "max_new_tokens"),
    "an empty stop": (CHATS, {"messages": TALK, "stop": [""]}, 400, "stop"),
    "a seed that is none": (CHATS, {"messages": TALK, "seed": "x"}, 400, "seed"),
    "two lengths": (CHATS, {"messages": TALK, "max_tokens": 3, "max_completion_tokens": 4}, 400, "leave one of them out"),
    "a prompt beside messages": (CHATS, {"messages": TALK, "prompt": "w"}, 400, "prompt is 'w'"),
    "tools for a text": (TEXTS, {"prompt": "w", "tools": [{}]}, 400, "beside messages"),
    "words beside a stream": (CHATS, {"messages": TALK, "stream_options": {"include_obfuscation": True}}, 400, "obfuscation"),
    "a stream that is none": (CHATS, {"messages": TALK, "stream": "yes"}, 400, "stream"),
    "a long prompt": (TEXTS, {"prompt": "w" * 97}, 400, "97 tokens; this server takes 96"),
    "a long answer": (TEXTS, {"prompt": "w" * 90, "max_tokens": 39}, 400, "ask for 38"),
    "no object": (TEXTS, ["w"], 400, "object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_is_refused_with_a_reason(server: Server, name: str) -> None:
    path, body, status, word = REFUSED[name]
    found = server.http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert found.status_code == status
    error = found.json()["error"]
    assert word in error["message"]
    assert error["type"] == "invalid_request_error"


def test_values_that_change_nothing_are_taken(model: Path) -> None:
    """Each of the table's: what programs always send, whatever they ask for."""
    reader = RequestReader("tiny", Asking(Prompts(_tokenizer(model))), Limits(96, 128, 64))
    for shape, body in ((CHAT, {"messages": TALK, "temperature": 0}), (TEXT, {"prompt": "w", "temperature": 0})):
        plain = reader.read(shape, json.dumps(body).encode())
        for key, values in NEUTRAL.items():
            for value in (None, *values):
                found = reader.read(shape, json.dumps({**body, key: value}).encode())
                assert {key: each for key, each in found.settings.items() if each is not None} == plain.settings, key
                assert replace(found, settings=plain.settings) == plain, key
        off = {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}}
        assert not reader.read(shape, json.dumps(body | off).encode()).tells_usage
        whole = reader.read(shape, json.dumps({**body, "max_tokens": -1}).encode())
        assert whole.new_tokens == 128 - len(whole.prompts[0])


def test_a_penalty_of_one_switches_off_the_models_own(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    config = json.loads((model / "generation_config.json").read_text())
    (own / "generation_config.json").write_text(json.dumps(config | {"repetition_penalty": 1.9}))
    asked = {"prompt": "water", "max_tokens": 24, "temperature": 0.7, "seed": 3}
    with serving(model) as plain:
        want, off = (plain.post(TEXTS, **asked, **more).json()["choices"] for more in ({}, {"top_k": -1}))
    with serving(own) as server:
        assert server.post(TEXTS, **asked).json()["choices"] != want
        assert server.post(TEXTS, **asked, repetition_penalty=1.0).json()["choices"] == want
        assert off != want, "transformers takes 50 of the likeliest tokens where nothing is said"


def test_a_streamed_request_is_refused_before_its_stream_begins(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="token 400"):
        server.client.completions.create(model="tiny", prompt=[1, 400], stream=True)
    with pytest.raises(openai.NotFoundError, match="gpt"):
        server.client.chat.completions.create(model="gpt", messages=TALK, stream=True)


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[" * 60000, "application/json", 400),
        (b"\xff", "application/json", 400),
        (b'{"prompt": "w"}', "text/plain", 415),
        (b'{"prompt": "' + b"w" * 70000 + b'"}', "application/json", 413),
    ],
    ids=["cut", "deep", "no UTF-8", "no JSON", "large"],
)
def test_a_body_that_is_no_request_is_refused(server: Server, content: bytes, kind: str, status: int) -> None:
    found = server.http.post(TEXTS, content=content, headers={"content-type": kind})
    assert found.status_code == status
    assert found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("verb", "path", "status"), [("GET", "/v1/responses", 404), ("GET", CHATS, 405), ("POST", "/reset", 404)]
)
def test_only_the_endpoints_named_are_there(server: Server, verb: str, path: str, status: int) -> None:
    found = server.http.request(verb, path)
    assert found.status_code == status
    assert "endpoint" in found.json()["error"]["message"]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3) | st.just("\ud83d"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)
KEYS = (
    *("model", "messages", "prompt", "stop", "seed", "stream", "stream_options", "max_tokens", "temperature", "tools"),
    *("tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "n", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "echo", "logit_bias", "stop_token_ids", "frequency_penalty", "min_p", "timings_per_token"),
)


@pytest.mark.wide
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=ANY | st.dictionaries(st.sampled_from(KEYS), ANY | st.just(TALK), max_size=4), chat=st.booleans())
def test_any_body_is_read_or_refused(body: Any, chat: bool, model: Path) -> None:
    reader = RequestReader("tiny", Asking(Prompts(_tokenizer(model))), Limits(96, 128, 64))
    found: GenerationRequest | None = None
    with contextlib.suppress(Refused):
        found = reader.read(CHAT if chat else TEXT, json.dumps(body).encode())
    assert found is None or found.prompts[0]


@cache
def _tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_takes_no_other_with_it(server: Server, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a draw of a token from scores that are no numbers."""
    own = desk._Gone.__call__

    def ends(self: Any, ids: Any, scores: Any, **more: Any) -> Any:
        if self._request.seed == 13 and ids.shape[1] > len(self._request.ids) + 2:
            raise RuntimeError("no numbers")
        return own(self, ids, scores, **more)

    monkeypatch.setattr(desk._Gone, "__call__", ends)
    with ThreadPoolExecutor(3) as threads:
        bodies = [{"prompt": "water", "max_tokens": 20, "temperature": 0, "seed": seed} for seed in (1, 13, 2)]
        bodies[1]["stream"] = stream
        good, failed, other = threads.map(lambda body: server.post(TEXTS, **body), bodies)
    assert good.json()["choices"] == other.json()["choices"]
    assert failed.status_code == (200 if stream else 500)
    found = failed.text.strip().splitlines()[-1].removeprefix("data: ")
    assert json.loads(found)["error"]["message"] == "the answer failed: RuntimeError: no numbers"


def test_more_requests_than_allowed_are_told_to_come_again(serve_it: Serve) -> None:
    with serve_it(seats=1, max_requests=2, max_length=64) as server:
        with server.passes.held():
            asked = server.http.build_request("POST", CHATS, json={"messages": TALK, "max_tokens": 20, "stream": True})
            stream = server.http.send(asked, stream=True)
            waiting = hand_in(server, {"prompt": "w", "max_tokens": 3})
            server.until("headrace_waiting", 1)
            refused = server.post(TEXTS, prompt="w")
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "--max-requests" in refused.json()["error"]["message"]
        assert b'"finish_reason"' in b"".join(stream.iter_bytes())
        assert b" 200 " in waiting.recv(1 << 16)
        waiting.close()


def hand_in(server: Server, body: dict[str, Any], path: str = TEXTS) -> socket.socket:
    """Send a request by hand, and return the socket that its answer comes to."""
    content = json.dumps(body)
    found = socket.create_connection((server.http.base_url.host, server.http.base_url.port or 0), timeout=200)
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(content)}")
    found.sendall("\r\n".join((*lines, "", content)).encode())
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_seat(serve_it: Serve, stream: bool) -> None:
    with serve_it(seats=1, max_requests=3) as server:
        with server.passes.held():
            gone = [hand_in(server, {"messages": TALK, "max_tokens": 100, "stream": stream}, CHATS) for _ in range(2)]
            server.until("headrace_running", 1)
            server.until("headrace_waiting", 1)
            for each in gone:
                each.close()
            server.until("headrace_waiting", 0)
        server.until("headrace_running", 0)
        assert server.figure("headrace_generated_tokens_total") < 100
        assert server.post(TEXTS, prompt="w", max_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_a_server_with_keys_answers_who_has_one(serve_it: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first-key\nother-key\n")
    with serve_it(host="0.0.0.0", api_key_file=tmp_path / "keys") as server:
        bearer = {"authorization": "Bearer other-key"}
        assert server.http.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics"):
            assert server.http.get(path).json()["error"]["code"] == "invalid_api_key"
            assert server.http.get(path, headers={"authorization": "Bearer first"}).status_code == 401
            assert server.http.get(path, headers=bearer).status_code == 200
        assert server.post(TEXTS, prompt="w").status_code == 401
        with pytest.raises(openai.AuthenticationError):
            server.client.completions.create(model="tiny", prompt="w")
        server.client.api_key = "first-key"
        assert server.client.completions.create(model="tiny", prompt="w", max_tokens=2).usage.completion_tokens == 2


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "open to others": ({"host": "0.0.0.0"}, ConfigError, "--api-key-file"),
    "no such host": ({"host": "no.such.host.invalid"}, ConfigError, "not known"),
    "no keys": ({"api_key_file": "/dev/null"}, ConfigError, "empty"),
    "no file": ({"api_key_file": "/nowhere/keys"}, ConfigError, "cannot be read"),
    "too long": ({"max_length": 257}, ConfigError, "256 positions"),
    "too little memory": ({"host_memory": "100MiB"}, PlanInfeasible, "host memory"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_cannot_be_says_why(serve_it: Serve, name: str) -> None:
    options, kind, words = WRONG[name]
    with pytest.raises(kind, match=words), serve_it(**options):
        pass


def test_a_port_that_is_taken_is_refused_before_the_model_is_opened(tmp_path: Path, serve_it: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on .*--port"), serve_it(port=port):
            pass
