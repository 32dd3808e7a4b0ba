"""No file of a tokenizer ends in a traceback: data and prompts become tokens, or are refused by an error of ours."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_templates import TEMPLATES, tokenizer_of
from conversations import row_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutated import JUNK, mutated
from tiers import sampled

from headrace.data import DataSpec, load_tokens
from headrace.data.batches.open_data import open_tokenizer
from headrace.data.batches.turn_end import turn_end
from headrace.data.chat.prompts import Prompts
from headrace.terms.errors import HeadraceError

# Pieces that a template may hold, of which few fit together.
_PIECES = (
    *(
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "{% for m in messages %}",
        "{% endfor %}",
        "{{ m.content }}",
        "{{ m['role'] }}",
        "{% if x %}",
    ),
    *("{% generation %}", "{% endgeneration %}", "{% endif %}", "{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ x.y.z }}"),
    *(
        "{{ raise_exception('no') }}",
        "{{ strftime_now('%d') }}",
        "{{ strftime_now(3) }}",
        "{{ '\\ud83d' }}",
        "{{ tools | tojson }}",
    ),
    *(
        "{% set x = messages %}",
        "{{ messages | map(attribute='content') | join }}",
        "{{ m.content | no_filter }}",
        "\0",
        "<|end|>",
    ),
    *("{% include 'x' %}", "{% break %}", "{{ eos_token }}", "{{ bos_token + 1 }}", "{{ cycler }}", "{{ namespace(a=1).a }}"),
)
FILES = ("tokenizer_config.json", "tokenizer.json", "chat_template.jinja")
_CASES = [(file, template) for file in FILES for template in ("chatml", "tagged", "llama3", "qwen3")]
_QUICK = (("tokenizer_config.json", "chatml"), ("chat_template.jinja", "tagged"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def save(template: str) -> Path:
        folder = tmp_path_factory.mktemp(template)
        tokenizer_of(TEMPLATES[template]).save_pretrained(str(folder))
        return folder

    return save


def _read(model: Path, folder: Path) -> None:
    """Read data and a prompt as `train` and `generate` do."""
    tokenizer = open_tokenizer(model)
    path = folder / "rows.jsonl"
    path.write_text(f"{json.dumps(row_of('call'))}\n{json.dumps(row_of('one'))}\n", encoding="utf-8")
    texts = folder / "texts.jsonl"
    texts.write_text('{"text": "one"}\n', encoding="utf-8")
    for read in (
        lambda: load_tokens(DataSpec(paths=(str(path),), sequence_length=64, tokens_per_step=64), tokenizer, folder / "cache"),
        lambda: load_tokens(DataSpec(paths=(str(texts),), sequence_length=64, tokens_per_step=64), tokenizer, folder / "cache"),
        lambda: Prompts(tokenizer).of_text("one"),
        lambda: turn_end(tokenizer),
    ):
        _refused(read)


def _refused(read: Callable[[], object]) -> None:
    """Read; a refusal of ours is all that may come of it."""
    refusal = ""
    try:
        read()
    except HeadraceError as error:
        refusal = str(error)
    assert len(refusal) < 2500, refusal


@pytest.mark.parametrize(("file", "template"), sampled(_CASES, _QUICK))
def test_a_mutated_tokenizer_is_used_or_refused(file: str, template: str, saved: Callable[[str], Path]) -> None:
    folder = saved(template)
    text = (folder / file).read_text(encoding="utf-8")
    made: st.SearchStrategy[str]
    if file.endswith(".jinja"):
        pieces = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join)
        cut = st.tuples(st.integers(0, len(text)), st.sampled_from(_PIECES), st.integers(0, 9))
        made = pieces | cut.map(lambda at: text[: at[0]] + at[1] + text[at[0] + at[2] :])
    else:
        values = json.loads(text)
        if file == "tokenizer_config.json":
            values |= {"chat_template": None, "bos_token": None, "unk_token": "<|eos|>", "add_bos_token": False}
        made = mutated(values).map(json.dumps) | st.sampled_from(JUNK[:9]).map(json.dumps)

    @settings(max_examples=4 if (file, template) in _QUICK else 25, suppress_health_check=list(HealthCheck))
    @given(made)
    def used(changed: str) -> None:
        with tempfile.TemporaryDirectory() as place:
            model = Path(place) / "model"
            model.mkdir()
            for each in folder.iterdir():
                (model / each.name).write_bytes(each.read_bytes())
            (model / file).write_text(changed, encoding="utf-8")
            _refused(lambda: _read(model, Path(place)))

    used()
