"""A chat template that asks for the date gets the run's day wherever the run is read, whatever day it is."""

import json
import shutil
import threading
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.compress.run import compress_model
from headrace.data import BatchStream
from headrace.data.batches import open_data
from headrace.data.batches.open_data import open_tokenizer
from headrace.data.chat.prompts import Prompts
from headrace.files.yaml_options import from_yaml
from headrace.generate.passes.whose_weights import open_generator
from headrace.generate.uses import jobs
from headrace.generate.uses.answering import Answerer
from headrace.generate.uses.evaluating import evaluate_model
from headrace.generate.uses.jobs import run_job
from headrace.peers.node.run import serve
from headrace.peers.node.working import work
from headrace.runs import train
from headrace.terms.errors import RunDirectoryError
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.run_options import NodeOptions, RunOptions

FIRST, NEXT, GIVEN = "2025-05-05", "2031-02-03", "2019-08-07"
ASKS = "{{ strftime_now('%Y-%m-%d') }}"


class Clock(date):
    """Says the day that a test sets; to threads, which are workers, another one."""

    day = FIRST

    @classmethod
    def today(cls) -> "Clock":
        main = threading.current_thread() is threading.main_thread()
        return cls.fromisoformat(cls.day if main else GIVEN)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    monkeypatch.setattr(Clock, "day", FIRST)
    for module in (open_data, jobs):
        monkeypatch.setattr(module, "date", Clock)
    return Clock


@pytest.fixture(scope="module")
def dated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template begins with the day."""
    directory = tmp_path_factory.mktemp("dated") / "model"
    shutil.copytree(model, directory)
    template = directory / "chat_template.jinja"
    template.write_text(ASKS + template.read_text(encoding="utf-8"), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("chats") / "a.jsonl"
    said = ({"role": "user", "content": "go"}, {"role": "assistant", "content": "water flows"})
    path.write_text((json.dumps({"messages": said}) + "\n") * 40, encoding="utf-8")
    return str(path)


def run_options(dated: Path, chats: str, output: Path, **more: Any) -> dict[str, Any]:
    values = {"model": dated, "data": chats, "output": output, "cache": output.parent / "cache", "host_memory": "4GiB"}
    sizes = {"sequence_length": 48, "tokens_per_step": 96, "max_steps": 2, "compute_dtype": "float32", "measure": False}
    return values | sizes | {"keep_state": True} | more


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that were read, as texts."""
    texts, plain = list[str](), Prompts._ids
    monkeypatch.setattr(Prompts, "_ids", lambda self, text, **options: texts.append(text) or plain(self, text, **options))
    return texts


@pytest.mark.wide
@pytest.mark.parametrize(("adapter", "finished"), [(None, True), pytest.param("lora:rank=2", False, marks=pytest.mark.deep)])
def test_a_run_that_is_read_brings_its_day(
    adapter: str | None, finished: bool, dated: Path, chats: str, tmp_path: Path, clock: type[Clock], read: list[str]
) -> None:
    run = tmp_path / "run"
    train(RunOptions.of(run_options(dated, chats, run, adapter=adapter)))
    if not finished:
        shutil.rmtree(run / "final")
    clock.day = NEXT
    asked = {"data": chats, "host_memory": "4GiB", "sequence_length": 48, "cache": tmp_path / "another"}
    if finished:
        losses = {
            day: evaluate_model(place, EvalOptions.of(asked | ({"template_date": day} if day else {}))).loss
            for place, day in ((run, None), (run / "final", FIRST), (run, GIVEN))
        }
        assert losses[None] == losses[FIRST] != losses[GIVEN]
    for given in (None, GIVEN):
        options = GenerateOptions.of({"max_new_tokens": 1, "host_memory": "4GiB", "template_date": given})
        with Answerer(open_generator(run, options, None), options) as talk:
            talk.answer("water", lambda text: None)
    assert [text[:10] for text in read] == [FIRST, GIVEN]


def test_a_file_of_prompts_keeps_the_day_on_which_it_was_begun(
    dated: Path, tmp_path: Path, clock: type[Clock], read: list[str]
) -> None:
    def answer(most: int | None = None, **more: Any) -> int:
        values = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl", "max_new_tokens": 2, "rows": 1, "seats": 1}
        options = GenerateOptions.of({**values, "host_memory": "4GiB", **more})

        def stop(found: jobs.JobProgress) -> None:
            if found.done == most:
                raise KeyboardInterrupt

        with open_generator(dated, options, None) as generator:
            return run_job(generator, options, sink=lambda event: None, tell_plan=lambda plan: None, progress=stop)

    (tmp_path / "in.jsonl").write_text('{"prompt": "water"}\n{"prompt": "flows"}\n', encoding="utf-8")
    with pytest.raises(KeyboardInterrupt):
        answer(most=1)
    clock.day = NEXT
    with pytest.raises(RunDirectoryError, match=f"begun with template_date {FIRST}, asked for is {GIVEN}"):
        answer(template_date=GIVEN)
    read.clear()
    assert answer() == 0
    assert [text[:10] for text in read] == [FIRST, FIRST]


@pytest.mark.deep
def test_a_node_goes_by_its_own_day_whatever_day_a_worker_has(
    dated: Path, chats: str, tmp_path: Path, clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts the same tokens as a run of one machine, keeps its day when it is begun again, and takes no other."""
    batches, plain = list[tuple[int, str]](), BatchStream.next_batch

    def next_batch(stream: BatchStream) -> Any:
        batch = plain(stream)
        batches.append((batch.num_tokens, open_tokenizer(dated).decode(batch.input_ids[0])))
        return batch

    def with_worker(**more: Any) -> None:
        def hire(address: Any) -> None:
            own = headrace.Options(host_memory="4GiB")
            threading.Thread(target=work, args=(address, own), kwargs={"name": "1", "wait_seconds": 1.0}, daemon=True).start()

        serve(NodeOptions.of(run_options(dated, chats, tmp_path / "node", listen="127.0.0.1:0") | more), listening=hire)

    monkeypatch.setattr(BatchStream, "next_batch", next_batch)
    train(RunOptions.of(run_options(dated, chats, tmp_path / "local")))
    local, batches[:] = list(batches), []
    assert all(text.startswith(FIRST) for _, text in local)
    with_worker()
    assert batches[: len(local)] == local
    clock.day = NEXT
    with pytest.raises(RunDirectoryError, match=f"template_date {NEXT} here, {FIRST} there"):
        serve(NodeOptions.of(run_options(dated, chats, tmp_path / "node", listen="127.0.0.1:0", template_date=NEXT)))
    shutil.rmtree(tmp_path / "node" / "final")
    with_worker()
    assert from_yaml(tmp_path / "node" / "config.yaml").template_date == FIRST


@pytest.mark.wide
def test_compressing_on_two_days_gives_the_same_bytes_with_the_option(
    dated: Path, chats: str, tmp_path: Path, clock: type[Clock]
) -> None:
    """Without it, a compression takes the day on which it was begun, says so, and goes on with it."""
    said, digests = list[str](), []

    def say(line: str) -> None:
        said.append(line)
        if stop and line.startswith("block 1 of"):
            raise KeyboardInterrupt

    def run(number: int, day: str, given: str | None) -> None:
        clock.day = day
        values = {"model": dated, "output": tmp_path / f"out{number}", "data": chats, "to": "int4", "group_size": 32}
        values |= {"compute_dtype": "float32", "host_memory": "4GiB", "cache": tmp_path / f"cache{number}-{day}"}
        compress_model(CompressOptions.of(values | {"sequence_length": 32, "template_date": given}), say=say)
        note = json.loads((tmp_path / f"out{number}" / "compression.json").read_text(encoding="utf-8"))
        digests.append(note["digests"])

    for number, (day, given) in enumerate([(FIRST, None), (NEXT, FIRST), (NEXT, None)]):
        stop = False
        run(number, day, given)
    stop = True
    with pytest.raises(KeyboardInterrupt):
        run(3, FIRST, None)
    stop = False
    with pytest.raises(RunDirectoryError, match=f"begun with template_date {FIRST}, asked for is {NEXT}"):
        run(3, NEXT, NEXT)
    run(3, NEXT, None)
    assert digests[0] == digests[1] == digests[3] != digests[2]
    dates = [line.split("it is ")[1][:10] for line in said if "asks for the date" in line]
    assert dates == [FIRST, FIRST, NEXT, FIRST, NEXT, FIRST]
