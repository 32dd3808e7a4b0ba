"""Templates that ask for the time get the day of the run, whatever day it is; nothing else depends on the day."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from chat_templates import TEMPLATES, tokenizer_of

from headrace.data import BatchStream, DataSpec, load_tokens
from headrace.data.batches import open_data
from headrace.data.chat.chat_template import Template
from headrace.data.tokens import tokenize
from headrace.terms.errors import ConfigError
from headrace.terms.options.run_options import RunOptions

PLAIN = TEMPLATES["chatml"]
FORMATS = ("%Y-%m-%d", "%d %b %Y", "%d %b %Y %H:%M:%S", "%s")
DATED = ["{{ strftime_now('" + each + "') }}" + PLAIN for each in FORMATS]
DATED.append("{%- if strftime_now is defined %}{%- set day = strftime_now('%A %B') %}{%- endif %}{{ day }}" + PLAIN)
CHATS = [{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": f"on {each}"}]} for each in range(9)]


class Tomorrow(date):
    """A clock of another day."""

    @classmethod
    def today(cls) -> "Tomorrow":
        return cls(2031, 2, 3)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 256}')
    return tmp_path / "model"


def options(model: Path, data: Path, template: str, **more: Any) -> RunOptions:
    tokenizer_of(template).save_pretrained(str(model))
    values = {"model": model, "data": str(data), "cache": model.parent / "cache", "packing": True}
    return open_data.with_lengths(RunOptions.of({**values, "sequence_length": 128, "tokens_per_step": 128, **more}))


def text_of(stream: BatchStream, config: RunOptions) -> str:
    batch = stream.next_batch()
    return str(open_data.open_tokenizer(config.model).decode(batch.input_ids[0]))


@pytest.mark.parametrize("template", DATED, ids=range(len(DATED)))
def test_a_template_that_asks_gets_midnight_of_the_day(template: str) -> None:
    messages = CHATS[0]["messages"]
    days = ["2024-02-29", "2030-12-31"]
    first, other = (Template.of(tokenizer_of(template), day).render(messages) for day in days)
    again = Template.of(tokenizer_of(template), days[0])
    assert first == again.render(messages) == again.render_tagged(messages)[0]
    assert first != other


@pytest.mark.parametrize("template", DATED, ids=range(len(DATED)))
def test_a_run_keeps_its_day(template: str, model: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = options(model, chats, template)
    stream = open_data.open_stream(config)
    today = date.today().isoformat()
    assert today in (stream.spec.template_date, date.today().isoformat())
    assert any(f"the chat template asks for the date: it is {stream.spec.template_date}" in each for each in stream.notices)
    begun = options(model, chats, template, template_date=stream.spec.template_date)
    expected, state = text_of(stream, config), stream.state()
    monkeypatch.setattr(open_data, "date", Tomorrow)
    for cache in (begun.cache, begun.cache.with_name("lost")):
        resumed = open_data.open_stream(
            options(model, chats, template, template_date=begun.template_date, cache=cache), resumed=True
        )
        assert text_of(resumed, begun) == expected
        resumed.restore(state)
    another = open_data.open_stream(config)
    assert another.spec.template_date == "2031-02-03"
    assert another.state()["samples_digest"] != state["samples_digest"]


@pytest.mark.parametrize(
    ("template", "rows"), [(PLAIN, CHATS), (DATED[0], [{"text": "some words"}] * 3)], ids=["chats", "text"]
)
def test_what_does_not_ask_does_not_depend_on_the_day(
    template: str, rows: list[dict[str, Any]], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = open_data.open_stream(options(model, path, template))
    assert stream.spec.template_date is None
    assert not any("date" in each for each in stream.notices)
    made = sorted(each.name for each in (tmp_path / "cache").iterdir())
    monkeypatch.setattr(open_data, "date", Tomorrow)
    open_data.open_stream(options(model, path, template))
    open_data.open_stream(options(model, path, template, template_date="2020-01-01"))
    assert sorted(each.name for each in (tmp_path / "cache").iterdir()) == made


def test_a_run_that_began_without_a_day_goes_on_with_its_tokens(
    model: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.1 had no days: its tokens are found again while they are in the cache, and another day is refused."""
    config = options(model, chats, DATED[0])
    spec = DataSpec(paths=(str(chats),), sequence_length=128, tokens_per_step=128, template_date="2025-05-05")
    tokenizer = open_data.open_tokenizer(model)
    with monkeypatch.context() as patch:
        patch.setattr(tokenize, "FORMAT_VERSION", 3)
        old = load_tokens(spec, tokenizer, config.cache)
    state = BatchStream(old, spec).state() | {"rules": 3}
    stream = open_data.open_stream(config, resumed=True)
    stream.restore(state)
    assert "2025-05-05" in text_of(stream, config)


@pytest.mark.parametrize("value", ["today", "2025-13-01", "25-01-01", 20250101, "2025-1-1", ""])
def test_a_day_that_is_none_is_refused(value: Any, model: Path, chats: Path) -> None:
    with pytest.raises(ConfigError, match="template_date: expected a day as YYYY-MM-DD"):
        options(model, chats, PLAIN, template_date=value)


def test_days_are_read_as_yaml_has_them(model: Path, chats: Path) -> None:
    assert options(model, chats, PLAIN, template_date=date(2025, 3, 4)).template_date == "2025-03-04"
