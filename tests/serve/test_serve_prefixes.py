"""Kept beginnings of prompts: answers are those of each request alone in the same chunks, and each whole chunk is read once."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import Serve, Server, serving
from test_serve_answers import SAMPLED, stock

from headrace.store.prefix_files import FOLDER
from headrace.terms.errors import ConfigError
from headrace.terms.options.serve_options import ServeOptions

CHUNK = 8
STORY = "ONCE THERE WAS A RIVER THAT RAN DOWN TO THE MILL AND ON TO THE SEA"  # each letter is a token


@pytest.fixture(scope="module")
def keeping(model: Path) -> Iterator[Server]:
    """A server that keeps chunks of eight tokens."""
    with serving(model, prefix_chunk=CHUNK, max_length=250) as found:
        yield found


def asked(server: Server, text: str, seed: int = 3, **more: object) -> tuple[str, int, int]:
    """Return the text, the number of tokens and those that were cached."""
    found = server.client.completions.create(model="tiny", prompt=text, max_tokens=9, seed=seed, **SAMPLED, **more)
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    return found.choices[0].text, found.usage.completion_tokens, found.usage.prompt_tokens_details.cached_tokens or 0


def alone(model: Path, text: str, seed: int = 3) -> tuple[str, int]:
    return stock(model, text, chat=False, new=9, seed=seed, prefill_chunk_size=CHUNK, **SAMPLED)


def test_turns_of_a_conversation_read_what_is_new(keeping: Server, model: Path) -> None:
    """Each turn brings the last one's prompt, and a whole chunk and more behind it; of an edited turn the beginning counts."""
    for length, cached in ((20, 0), (37, 16), (50, 32), (50, 48)):
        text = STORY[:length]
        assert asked(keeping, text) == (*alone(model, text), cached)
    edited = STORY[:30] + "?" + STORY[31:45]
    assert asked(keeping, edited) == (*alone(model, edited), 24)
    assert asked(keeping, STORY[:24])[2] == 16  # a token at least is read


def test_keys_and_salts_share_nothing(keeping: Server) -> None:
    text = "A PROMPT OF TWO WHO DO NOT KNOW EACH OTHER"
    assert [asked(keeping, text, extra_body={"cache_salt": salt})[2] for salt in ("one", "two", "one")] == [0, 0, 40]
    assert keeping.post("/v1/completions", prompt="w", cache_salt="").status_code == 400


def test_each_api_key_has_prefixes_of_its_own(serve_it: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("first\nsecond\n", encoding="ascii")
    with serve_it(prefix_chunk=CHUNK, api_key_file=tmp_path / "keys") as server:
        found = []
        for key in ("first", "second", "second", "first"):
            answer = server.http.post(
                "/v1/completions", json={"prompt": STORY[:33], "max_tokens": 2}, headers={"Authorization": f"Bearer {key}"}
            )
            found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found == [0, 0, 32, 32]


def test_of_many_that_come_together_each_whole_chunk_is_read_once(serve_it: Serve, model: Path) -> None:
    texts = [STORY[:48] + "ABCDEFGH"[number] * 3 for number in range(8)]
    with serve_it(prefix_chunk=CHUNK) as server:
        with server.passes.held(), ThreadPoolExecutor(8) as threads:
            answers = [threads.submit(asked, server, text) for text in texts]
            server.until("headrace_waiting", 7)
            server.passes._may_go.set()
            found = [answer.result() for answer in answers]
        assert server.figure("headrace_prompt_tokens_cached_total") == 7 * 48
        assert server.figure("headrace_prefix_chunks") == 6
    assert sorted(cached for *_, cached in found) == [0, *[48] * 7]
    assert [answer[:2] for answer in found] == [alone(model, text) for text in texts]


def test_without_memory_for_them_nothing_is_kept(serve_it: Serve) -> None:
    with serve_it(prefix_chunk=CHUNK, prefix_memory=0) as server:
        assert [asked(server, STORY[:40])[2] for _ in range(2)] == [0, 0]


def test_a_client_that_goes_leaves_nothing_half_read(serve_it: Serve, model: Path) -> None:
    with serve_it(prefix_chunk=CHUNK) as server:
        with server.passes.held(), pytest.raises(Exception, match="timed out"):
            server.http.post("/v1/completions", json={"prompt": STORY[:41], "max_tokens": 5}, timeout=0.5)
        server.until("headrace_running", 0)
        text, count, _ = asked(server, STORY[:44])
        assert (text, count) == alone(model, STORY[:44])


def test_what_is_on_a_drive_outlives_the_server_and_damage_is_passed_over(serve_it: Serve, model: Path, tmp_path: Path) -> None:
    options = {"prefix_chunk": CHUNK, "ssd": (tmp_path,), "prefix_ssd": "1MiB", "copy_weights": False}
    text, edited = STORY[:60], STORY[:45] + "!" * 12
    with serve_it(**options) as server:
        assert asked(server, text) == (*alone(model, text), 0)
    with serve_it(**options) as server:
        assert asked(server, edited) == (*alone(model, edited), 40)
        for path in (tmp_path / FOLDER).iterdir():
            path.write_bytes(path.read_bytes()[:-1])
        assert asked(server, text) == (*alone(model, text), 40)  # of which memory has the beginning
    with serve_it(**options, compute_dtype="bfloat16") as server:
        assert asked(server, text)[2] == 0


def test_with_room_for_few_in_memory_the_rest_is_read_from_the_drive(serve_it: Serve, model: Path, tmp_path: Path) -> None:
    room = {"prefix_memory": 6 * CHUNK * 512, "ssd": (tmp_path,), "prefix_ssd": "1MiB", "copy_weights": False}
    texts = [letter * 20 + STORY[:20] for letter in "ABC"]
    with serve_it(prefix_chunk=CHUNK, **room) as server:
        found = [asked(server, text) for text in texts * 2]
    assert [answer[:2] for answer in found] == [alone(model, text) for text in texts * 2]
    assert [cached for *_, cached in found] == [0, 0, 0, 32, 32, 32]


def test_room_on_a_drive_needs_a_drive() -> None:
    with pytest.raises(ConfigError, match="prefix_ssd: no drive is named to keep beginnings of prompts on; give --ssd DIR"):
        ServeOptions.of({"prefix_ssd": "1GiB"})
