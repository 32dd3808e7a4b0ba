"""Files of prompts: every line is answered or says why not, and a job that was killed ends with the same bytes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from headrace.cli.screen import say
from headrace.data.chat.prompt_lines import read_line
from headrace.data.chat.prompts import Prompts
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.whose_weights import open_generator
from headrace.generate.uses.jobs import JobProgress, run_job
from headrace.terms.errors import ConfigError, DataError, RunDirectoryError, StorageError
from headrace.terms.options.generate_options import GenerateOptions

FOUR = {"max_tokens": 4}
LINES: list[Any] = [
    {"prompt": "water", "id": 7},
    {"messages": [{"role": "user", "content": "flows"}], "temperature": 0},
    {"prompt": "to the turbine", "max_new_tokens": 3},
    {"prompt": "w" * 90},
    {"prompt": "", "stop": ["w"]},
    {"question": "?"},
    {"prompt": "w", "temperature": -1},
    {
        "custom_id": "a",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
    },
    {"custom_id": "b", "body": {"messages": [{"role": "user", "content": "x"}], "n": 2}},
    {"custom_id": "c", "body": {"messages": [{"role": "user", "content": "x"}], "logprobs": True}},
    {"custom_id": "d", "body": {"messages": [{"role": "user", "content": "x"}], "stream": True}},
]
WRONG = {3: "positions", 5: "prompt", 6: "temperature", 8: "n is 2", 9: "logprobs", 10: "stream"}


class Killed(Exception):
    """Stands for a kill: nothing after it is written."""


def options_for(folder: Path, **more: Any) -> GenerateOptions:
    values = {"input": folder / "in.jsonl", "output": folder / "out.jsonl", "max_new_tokens": 6, "rows": 1, "temperature": 0.8}
    return GenerateOptions.of({**values, "host_memory": "4GiB", "seats": 2, **more})


def opened(model: Path, options: GenerateOptions) -> Generator:
    return open_generator(model, options, say)


def answer(model: Path, options: GenerateOptions, most: int | None = None) -> int:
    """Run a job; with `most`, it is killed after so many micro-batches."""
    seen = []

    def progress(found: JobProgress) -> None:
        seen.append(found)
        if len(seen) == most:
            raise Killed

    with opened(model, options) as generator:
        return run_job(generator, options, sink=say, tell_plan=lambda plan: None, progress=progress)


def write(folder: Path, lines: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_each_line_is_answered_or_says_why_not(model: Path, tmp_path: Path) -> None:
    write(tmp_path, LINES)
    assert answer(model, options_for(tmp_path)) == len(WRONG)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(LINES)
    for number, (line, out) in enumerate(zip(LINES, found, strict=True)):
        if number in WRONG:
            assert WRONG[number] in str(out["error"])
        elif "custom_id" in line:
            body = out["response"]["body"]
            assert out["custom_id"] == line["custom_id"]
            assert body["usage"]["completion_tokens"] <= 4
            assert body["choices"][0]["finish_reason"] in ("stop", "length")
        else:
            assert {key: out[key] for key in line} == line
            assert out["finish_reason"] == ("length" if out["completion_tokens"] == line.get("max_new_tokens", 6) else "stop")
    assert found[0]["id"] == 7
    assert not (tmp_path / "out.jsonl.job").exists()


HALF = "\\ud83d"
TALK = '{"messages": [{"role": "user", "content": "x"}]'
# Lines that have no answer; none of them keeps the others from theirs.
UNANSWERED = {
    "half a character": f'{{"prompt": "w {HALF}"}}',
    "half, in messages": f'{{"messages": [{{"role": "user", "content": "{HALF}"}}]}}',
    "half, in stop": f'{{"prompt": "w", "stop": ["{HALF}"]}}',
    "half, in a Batch": f'{{"custom_id": "{HALF}", "body": {{"messages": [{{"role": "user", "content": "{HALF}"}}]}}}}',
    "no JSON": '{"prompt": "w"',
    "deep": "[" * 100000,
    "many digits": '{"prompt": "w", "seed": ' + "9" * 5000 + "}",
    "tools are no list": TALK + ', "tools": {"a": 1}}',
    "tools are no objects": TALK + ', "tools": [1]}',
    "a picture": '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}',
    "a token beyond the embedding": '{"prompt": "w <beyond>"}',
}


@pytest.fixture
def beyond(model: Path, tmp_path: Path) -> Path:
    """The model, with a tokenizer that knows one token too many, and a template that renders tools."""
    place = tmp_path / "beyond"
    shutil.copytree(model, place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.add_tokens([f"<more {number}>" for number in range(80)] + ["<beyond>"], special_tokens=True)
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + tokenizer.chat_template
    tokenizer.save_pretrained(place)
    return place


def test_no_line_ends_a_job(beyond: Path, tmp_path: Path) -> None:
    texts = ['{"prompt": "one"}', *UNANSWERED.values(), '{"prompt": "two"}']
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(texts).encode())
    assert answer(beyond, options_for(tmp_path)) == len(UNANSWERED)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert ["completion" in line for line in found] == [True, *(False for _ in UNANSWERED), True]
    for name, line in zip(UNANSWERED, found[1:-1], strict=True):
        assert line["error"], name
    assert "embedding" in found[-2]["error"]


def test_tools_are_rendered(beyond: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": [{"role": "user", "content": "x"}]}
    write(tmp_path, [body, {**body, "tools": [tool]}, {**body, "tools": json.dumps([tool])}, {**body, "tools": []}])
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write(json.dumps({"custom_id": "a", "body": {**body, "tools": [tool]}}) + "\n")
    assert answer(beyond, options_for(tmp_path)) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = [line["prompt_tokens"] for line in found[:4]] + [found[4]["response"]["body"]["usage"]["prompt_tokens"]]
    assert counts[0] == counts[3] < counts[1] == counts[2] == counts[4]


@pytest.mark.parametrize(
    ("key", "own"),
    {
        "temperature": {"do_sample": True, "temperature": 0.0},
        "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
        "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    }.items(),
)
def test_the_models_own_settings_are_refused_before_the_plan(
    key: str, own: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    place = tmp_path / "own"
    shutil.copytree(model, place)
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, **own}))
    write(tmp_path, [{"prompt": "w"}])
    options = options_for(tmp_path, temperature=None)
    with opened(place, options) as generator, pytest.raises(ConfigError, match=f"generation_config.json: {key}"):
        run_job(generator, options, sink=say, tell_plan=pytest.fail, progress=pytest.fail)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=3) | st.just("\ud83d"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=5,
)
KEYS = ("role", "content", "tool_calls", "name", "type", "text", "function", "arguments", "weight")
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(KEYS), ANY | st.sampled_from(["user", "assistant", "text"]), max_size=4), max_size=2
)
LINE = st.dictionaries(
    st.sampled_from(["prompt", "messages", "tools", "stop", "seed", "top_k", "temperature", "custom_id", "body", "url"]),
    ANY | MESSAGES | st.fixed_dictionaries({"messages": MESSAGES}),
    max_size=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(line=LINE | ANY)
def test_any_line_is_read_or_refused(line: Any, model: Path) -> None:
    found = read_line(1, json.dumps(line), Prompts(_tokenizer(model)))
    assert bool(found.ids) != bool(found.error)
    json.dumps(found.refused("so") if found.error else found.answered(dict.fromkeys(ANSWER, 1)))


ANSWER = ("completion", "finish_reason", "prompt_tokens", "completion_tokens", "micro_batch", "seed")


@cache
def _tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def test_a_killed_job_ends_with_the_bytes_of_an_unbroken_one(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "water " * (1 + number % 3)} for number in range(7)]
    write(tmp_path / "whole", lines)
    write(tmp_path / "killed", lines)
    answer(model, options_for(tmp_path / "whole", rows=2))
    options = options_for(tmp_path / "killed", rows=2)
    for _ in range(2):
        with pytest.raises(Killed):
            answer(model, options, most=1)
        with (tmp_path / "killed/out.jsonl.job/done.jsonl").open("ab") as file:
            file.write(b'{"micro_batch": 3, "answ')  # cut in the middle of a line
    with pytest.raises(RunDirectoryError, match="was begun with"):
        answer(model, options_for(tmp_path / "killed", rows=2, seed=1))
    assert answer(model, options) == 0
    whole, killed = ((tmp_path / name / "out.jsonl").read_bytes() for name in ("whole", "killed"))
    assert whole == killed


def test_a_job_goes_on_with_the_options_that_decide_its_answers(model: Path, tmp_path: Path) -> None:
    """Also one that a version began which knew fewer of them."""
    write(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    options = options_for(tmp_path)
    with pytest.raises(Killed):
        answer(model, options, most=1)
    path = tmp_path / "out.jsonl.job/record.json"
    whole = json.loads(path.read_text())
    older = {key: value for key, value in whole["identity"].items() if key not in ("adapter", "prompt_lookup")}
    path.write_text(json.dumps({**whole, "identity": older}))
    with opened(model, options) as generator:
        for change in (
            {"top_k": 3},
            {"stop": ("x",)},
            {"prompt_lookup": 2},
            {"adapter": tmp_path},
            {"compute_dtype": "bfloat16"},
        ):
            with pytest.raises(RunDirectoryError, match="was begun with"):
                run_job(generator, options_for(tmp_path, **change), sink=say, tell_plan=print, progress=print)
    assert answer(model, options_for(tmp_path, seats=1, most_lost="5m")) == 0


def test_a_job_whose_prompts_were_read_otherwise_is_refused(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}]
    write(tmp_path, lines)
    with pytest.raises(Killed):
        answer(model, options_for(tmp_path), most=1)
    path = tmp_path / "out.jsonl.job/record.json"
    whole = json.loads(path.read_text())
    older = {key: value for key, value in whole.items() if key != "prompts"}
    for changed in (older, {**whole, "prompts": "others"}, {**whole, "micro_batches": [[1]]}, {}, []):
        path.write_text(json.dumps(changed))
        with pytest.raises(RunDirectoryError, match=r"(begin|start) again"):
            answer(model, options_for(tmp_path))
    path.write_text(json.dumps(whole))
    assert answer(model, options_for(tmp_path)) == 0


@pytest.mark.deep
@pytest.mark.process
def test_a_job_that_is_killed_for_good_goes_on(model: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "water " * (1 + number % 3)} for number in range(12)]
    for name in ("whole", "killed"):
        write(tmp_path / name, lines)
    answer(model, options_for(tmp_path / "whole"))
    place = tmp_path / "killed"
    words = [sys.executable, "-m", "headrace", "generate", str(model), "--input", str(place / "in.jsonl")]
    words += ["--output", str(place / "out.jsonl"), "--max-new-tokens", "6", "--rows", "1", "--seats", "2"]
    words += ["--temperature", "0.8", "--host-memory", "4GiB"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = place / "out.jsonl.job/done.jsonl"
    while process.poll() is None and not (kept.exists() and kept.stat().st_size):
        time.sleep(0.01)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if not (place / "out.jsonl").exists():
        answer(model, options_for(place))
    assert (place / "out.jsonl").read_bytes() == (tmp_path / "whole/out.jsonl").read_bytes()


def test_a_file_that_cannot_be_used_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_for(tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        answer(model, options)
    write(tmp_path, [])
    with pytest.raises(DataError, match="is empty"):
        answer(model, options)
    write(tmp_path, LINES[:1])

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.store.work.os.fsync", full)
        with pytest.raises(StorageError, match="free some space"):
            answer(model, options)
    (tmp_path / "out.jsonl").write_text("something")
    with pytest.raises(RunDirectoryError, match="exists"):
        answer(model, options)
