"""The loss of held-out data is that of plain transformers, sample by sample, with the marks of training."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_models import add_unused, own_loss
from tiers import sampled
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import headrace
from headrace.cli import main
from headrace.engine.merging import merge_adapters
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.uses.evaluating import evaluate_model
from headrace.generate.uses.evaluator import Continuations, Evaluator
from headrace.model.seats import scoring
from headrace.terms.errors import ConfigError, DataError, ModelError
from headrace.terms.options.budget import Budget
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.packed_rows import padded_together

CHATS = [[("user", "w" * (1 + each)), ("assistant", "water" * (1 + each % 3))] for each in range(7)]


def write(path: Path, lines: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def chats(path: Path) -> str:
    return write(path, [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS])


def texts(path: Path) -> str:
    return write(path, [{"text": "water and turbine "[: 5 + 2 * each]} for each in range(7)])


def options(data: str, cache: Path, **more: Any) -> EvalOptions:
    given = {"host_memory": "4GiB", "sequence_length": 48, "compute_dtype": "float32"}
    return EvalOptions.of({"data": [data], "cache": cache, **given, **more})


def text_samples(model: Path) -> list[tuple[list[int], list[bool]]]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    made = []
    for each in range(7):
        ids = [*tokenizer("water and turbine "[: 5 + 2 * each])["input_ids"], tokenizer.eos_token_id]
        made.append((ids, [True] * len(ids)))
    return made


@pytest.mark.parametrize(("packing", "device"), [(None, None), (False, "64MiB")])
def test_texts_have_the_loss_of_transformers(packing: bool | None, device: str | None, model: Path, tmp_path: Path) -> None:
    found = evaluate_model(model, options(texts(tmp_path / "a.jsonl"), tmp_path, packing=packing, device_memory=device, rows=2))
    loss, tokens = own_loss(model, text_samples(model))
    assert found.tokens == tokens
    assert found.loss == pytest.approx(loss, rel=1e-6)
    assert found.samples == 7
    assert (found.rows < 7) is (packing is None)


def test_of_conversations_the_assistants_words_count(
    model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user calls it: figures alone on standard output."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told = tmp_path / "told"  # whose template asks for an answer in the words in which it renders one
    told.mkdir()
    for path in model.iterdir():
        (told / path.name).symlink_to(path)
    (told / "chat_template.jinja").unlink()
    template = (model / "chat_template.jinja").read_text(encoding="utf-8").replace("<a>", "<assistant>")
    (told / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    samples = []
    for (_, asked), (_, answered) in CHATS:
        before = tokenizer(f"<user>{asked}<eos><assistant>", add_special_tokens=False)["input_ids"]
        ids = tokenizer(f"<user>{asked}<eos><assistant>{answered}<eos>", add_special_tokens=False)["input_ids"]
        assert ids[: len(before)] == before
        samples.append((ids, [index >= len(before) for index in range(len(ids))]))
    loss, tokens = own_loss(model, samples)
    words = ("--data", chats(tmp_path / "a.jsonl"), "--host-memory", "4GiB", "--compute-dtype", "float32")
    with pytest.raises(SystemExit) as left:
        main(["eval", str(told), *words, "--sequence-length", "64", "--json"])
    out = capsys.readouterr()
    assert not left.value.code, out.err
    found = json.loads(out.out)
    assert found["tokens"] == tokens
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(2.718281828459045**loss, rel=1e-5)
    assert "score" in out.err  # the plan, before


def test_a_run_is_measured_as_its_export_is(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    wanted = headrace.Options(output=run, compute_dtype="float32", host_memory="4GiB", learning_rate=0.05)
    ids = torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(0))
    with headrace.Engine.open(model, wanted) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        engine.save_pretrained(tmp_path / "out")
    (run / "config.yaml").write_text("", encoding="utf-8")  # by which a run is known
    data = texts(tmp_path / "a.jsonl")
    loss, _ = own_loss(tmp_path / "out", text_samples(model))
    assert evaluate_model(run, options(data, tmp_path)).loss == pytest.approx(loss, rel=1e-6)


@pytest.mark.wide
def test_adapters_are_measured_as_the_model_that_is_merged_with_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(0))
    wanted = headrace.Options(output=tmp_path / "run", compute_dtype="float32", learning_rate=0.05, adapter="dora:rank=4")
    with headrace.Engine.open(model, wanted) as engine:
        for _ in range(2):
            engine.step({"input_ids": ids, "labels": ids})
        engine.save_pretrained(tmp_path / "adapter")
    merge_adapters(model, tmp_path / "adapter", tmp_path / "merged", {})
    data = texts(tmp_path / "a.jsonl")
    loss, _ = own_loss(tmp_path / "merged", text_samples(model))
    base, _ = own_loss(model, text_samples(model))
    found = evaluate_model(model, options(data, tmp_path, adapter=tmp_path / "adapter"))
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert abs(loss - base) > 1e-4
    assert found.to_json()["adapter"] == str(tmp_path / "adapter")
    # A directory of adapters names its model; given as a model, another adapter cannot lie beside it.
    assert evaluate_model(tmp_path / "adapter", options(data, tmp_path)).loss == found.loss
    with pytest.raises(ConfigError, match="is an adapter itself"):
        evaluate_model(tmp_path / "adapter", options(data, tmp_path, adapter=tmp_path / "adapter"))


def test_what_cannot_be_measured_is_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match="empty"):
        evaluate_model(model, options(str(tmp_path / "empty.jsonl"), tmp_path))
    with pytest.raises(ConfigError, match="64 positions"):
        evaluate_model(model, options(texts(tmp_path / "a.jsonl"), tmp_path, sequence_length=65))


@pytest.mark.parametrize("positions", sampled([None, 5]))
def test_continuations_have_the_scores_of_transformers(
    positions: int | None, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths together, with logits of all positions at once and of some: lm-eval's tasks are scored so."""
    if positions is not None:
        monkeypatch.setattr(scoring, "chunk_positions", lambda chain, rows: positions)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, whole.config.vocab_size, (3, 17), generator=generator)
    targets = torch.full_like(rows, -100)
    for row, count in enumerate((4, 1, 9)):
        targets[row, 8 : 8 + count] = rows[row, 9 : 9 + count] if 8 + count < 17 else 0
    with torch.no_grad():
        found = whole(rows).logits.log_softmax(dim=-1)
    targets[1, 8] = found[1, 8].argmax()  # what greedy decoding would give
    opened = GenerationModel.of_directory(model, Budget(host="4GiB"), "float32", None)
    with Evaluator(opened, GenerateOptions(host_memory="4GiB"), 17) as evaluator:
        evaluator.prepare(3)
        ((_, seat),) = evaluator.continuations([Continuations(rows, targets)])
    for (score, likeliest), own, wanted in zip(seat.scores, found, targets, strict=True):
        at = (wanted != -100).nonzero().flatten()
        assert score == pytest.approx(float(own[at, wanted[at]].double().sum()), rel=1e-6)
        assert likeliest is bool((own[at].argmax(dim=-1) == wanted[at]).all())
    assert seat.scores[1][1]


@pytest.mark.wide
def test_token_ids_need_no_tokenizer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to be evaluated nor to calibrate a compression; text is refused, and the tokenizer named."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in model.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json"):
            (bare / path.name).symlink_to(path)
    rows = [[1 + (7 * row + 3 * place) % 250 for place in range(20 + row % 20)] for row in range(60)]
    data = write(tmp_path / "ids.jsonl", [{"input_ids": row} for row in rows])
    loss, tokens = own_loss(bare, [(row, [True] * len(row)) for row in rows])
    found = evaluate_model(bare, options(data, tmp_path / "cache"))
    assert (found.loss, found.tokens) == (pytest.approx(loss, rel=1e-6), tokens)
    with pytest.raises(ModelError, match="the tokenizer is missing"):
        evaluate_model(bare, options(texts(tmp_path / "texts.jsonl"), tmp_path / "cache"))
    asked = ["compress", str(bare), str(tmp_path / "out"), "--to", "int4", "--data", data, "--sequence-length", "64"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as ended:
        main([*asked, "--host-memory", "4GiB"])
    assert ended.value.code == 0
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize("value", sampled([float("nan"), float("inf")]))
@pytest.mark.parametrize(
    "where", sampled(["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
)
def test_a_weight_that_is_no_number_is_named(
    where: str, value: float, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        stock.get_parameter(where).flatten()[3::7] = value
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    stock.save_pretrained(broken)
    for old in broken.glob("model-0*"):
        old.unlink()
    (broken / "model.safetensors.index.json").unlink(missing_ok=True)
    words = ("--data", texts(tmp_path / "a.jsonl"), "--host-memory", "4GiB", "--compute-dtype", "float32")
    with pytest.raises(SystemExit) as left:
        main(["eval", str(broken), *words, "--sequence-length", "48"])
    assert left.value.code == 2
    out = capsys.readouterr()
    assert not out.out
    assert f"{where}: NaN or infinity" in out.err.splitlines()[-1]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_every_stored_tensor_that_is_not_used_is_named(count: int, model: Path, tmp_path: Path, capsys: Any) -> None:
    """As a script gets it; people get their number and some names."""
    more = tmp_path / "more"
    shutil.copytree(model, more)
    names = add_unused(more, count)
    words = ("--data", texts(tmp_path / "a.jsonl"), "--host-memory", "4GiB", "--sequence-length", "48", "--json")
    with pytest.raises(SystemExit) as left:
        main(["eval", str(more), *words])
    out = capsys.readouterr()
    assert not left.value.code, out.err
    assert json.loads(out.out)["unused_tensors"] == names
    assert (f"{count} stored tensors that the model does not have" in out.err) is (count > 0)


def test_a_sample_has_its_own_loss_beside_a_longer_one_that_changes_the_rotary_tables(model: Path, tmp_path: Path) -> None:
    """LongRoPE takes its long factors for a whole batch as soon as one row of it is long."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [6.0] * 4}
    long = tmp_path / "long"
    shutil.copytree(model, long)
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    samples = text_samples(long)
    assert min(len(ids) for ids, _ in samples) < 12 < max(len(ids) for ids, _ in samples)
    loss, tokens = own_loss(long, samples)
    for packing in (False, None):
        found = evaluate_model(long, options(texts(tmp_path / "a.jsonl"), tmp_path / "cache", packing=packing, rows=7))
        assert (found.loss, found.tokens) == (pytest.approx(loss, rel=1e-6), tokens)
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids, _ in samples])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in samples])
    batch = {"input_ids": ids, "labels": torch.where(mask == 1, ids, -100), "attention_mask": mask}
    with headrace.Engine.open(long, headrace.Options(output=tmp_path / "run", compute_dtype="float32")) as engine:
        found = engine.evaluate(batch)
    assert (found.loss, found.tokens, found.rows) == (pytest.approx(loss, rel=1e-5), tokens, 7)


def test_rows_share_a_group_that_may_be_padded_together() -> None:
    assert padded_together([9, 3, 12, 9, 14, 12], None) == [[0, 1, 2, 3, 4, 5]]
    assert padded_together([9, 3, 12, 9, 14, 12], 12) == [[0, 1, 3], [2, 5], [4]]
    assert padded_together([9, 3, 9], 0) == [[0, 2], [1]]
    assert padded_together([], 12) == []
