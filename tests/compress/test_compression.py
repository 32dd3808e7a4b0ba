"""`headrace compress`: what is written decodes, by the published definition, to a model with the loss that was said.

Run: pytest tests/compress/test_compression.py
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressing import files_of, options, run
from safetensors import safe_open
from tiers import sampled
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.codec import Int4Grid, gptq, nearest
from headrace.compress import quantiser as quantisers
from headrace.compress import room
from headrace.compress import run as compression
from headrace.compress.calibration import CalibrationData, open_calibration
from headrace.compress.coded_files import file_digest
from headrace.compress.quantiser import Quantiser
from headrace.compress.run import Compressed, result_table
from headrace.compress.schedule import BlockFigures, MatrixGroup, ProgramFigures, build_block
from headrace.flow.run.execute import interpreter_of
from headrace.model import Chain, Checkpoint
from headrace.plan.schedules.ledger import Snapshot
from headrace.terms.lanes import Lane
from headrace.terms.options.optimizer import Optimizer
from headrace.terms.program import Verb
from headrace.terms.provenance import COMPRESSION_NOTE_NAME


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    return found


def decoded(directory: Path) -> dict[str, torch.Tensor]:
    """Every weight by the definition of pack-quantized, a number at a time in NumPy."""
    stored, out = tensors_of(directory), {}
    for key, tensor in stored.items():
        if key.endswith("weight_packed"):
            stem = key.removesuffix("weight_packed")
            rows, columns = stored[f"{stem}weight_shape"].tolist()
            words = tensor.numpy().view(np.uint32)
            codes = np.stack([(words >> np.uint32(4 * k)) & 15 for k in range(8)], axis=-1).reshape(rows, -1)[:, :columns]
            scales = stored[f"{stem}weight_scale"]
            wide = np.repeat(scales.double().numpy(), columns // scales.shape[1], axis=1)
            out[f"{stem}weight"] = torch.from_numpy((codes.astype(np.float64) - 8) * wide).to(scales.dtype)
        elif not key.endswith(("weight_scale", "weight_shape")):
            out[key] = tensor
    return out


def loss_of(model: Path, weights: dict[str, torch.Tensor] | None, data: CalibrationData, folder: Path) -> float:
    """Loss of held-out rows in stock transformers, float32, with `weights` in the place of the model's own."""
    from safetensors.torch import save_file

    if weights is not None:
        folder.mkdir()
        save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text((model / "config.json").read_text())
        model = folder
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager").eval()
    total, tokens = 0.0, 0
    for rows in data.rows:
        if rows.held_out:
            with torch.no_grad():
                logits = stock(input_ids=rows.batch.input_ids, position_ids=rows.batch.position_ids).logits
            targets = torch.nn.functional.pad(rows.batch.labels[:, 1:], (0, 1), value=-100)
            total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            tokens += int((targets != -100).sum())
    return total / tokens


def data_of(model: Path, folder: Path) -> CalibrationData:
    chain = Chain.from_config(Checkpoint.open(model).config, "float32", Optimizer())
    return open_calibration(options(model, folder), chain, lambda text: None)


@pytest.mark.parametrize("kind", sampled(["dense", "mixture"]))
def test_losses_are_those_of_stock_transformers(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = request.getfixturevalue(kind)
    folder, result = request.getfixturevalue(f"{kind}_int4")
    data = data_of(model, folder)
    assert result.loss_before == pytest.approx(loss_of(model, None, data, tmp_path), rel=2e-6)
    assert result.loss_after == pytest.approx(loss_of(model, decoded(folder / "out"), data, tmp_path / "decoded"), rel=2e-6)
    assert result.loss_after != result.loss_before


def hooked_hessian(model: Path, module: str, data: CalibrationData) -> torch.Tensor:
    """X^T X of a module of the model as it came, float64, by a hook; of tokens that count."""
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager").eval()
    found: list[torch.Tensor] = []
    stock.get_submodule(module).register_forward_hook(lambda own, args, out: found.append(args[0]))
    total = torch.zeros((), dtype=torch.float64)
    for rows in data.rows:
        if not rows.held_out:
            found.clear()
            with torch.no_grad():
                stock(input_ids=rows.batch.input_ids, position_ids=rows.batch.position_ids)
            chosen = found[0][rows.counts].double()
            total = total + chosen.T @ chosen
    return total


def test_the_first_matrix_is_rounded_for_the_inputs_that_a_hook_sees(dense: Path, dense_int4: Any) -> None:
    folder, _ = dense_int4
    key = "model.layers.0.self_attn.v_proj"
    data = data_of(dense, folder)
    weight = tensors_of(dense)[f"{key}.weight"].float()
    grid = Int4Grid(group=32)
    expected = gptq(weight[None], hooked_hessian(dense, key, data).float()[None], grid).values[0]
    ours = decoded(folder / "out")[f"{key}.weight"].float()
    # Sums in another order may send a weight that lies between two steps to the other one.
    assert float((ours != expected).float().mean()) < 0.01
    assert float((ours != nearest(weight[None], grid).values[0]).float().mean()) > 0.05


def test_what_is_not_coded_has_its_bytes(dense: Path, dense_int4: Any) -> None:
    folder, _ = dense_int4
    before, after = tensors_of(dense), tensors_of(folder / "out")
    for key, tensor in before.items():
        coded = ".layers." in key and tensor.dim() == 2
        assert (key in after) != coded
        assert coded or torch.equal(after[key], tensor)
    assert (folder / "out" / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()


def test_the_note_has_digests_and_errors(dense_int4: Any) -> None:
    folder, result = dense_int4
    note = json.loads((folder / "out" / COMPRESSION_NOTE_NAME).read_text())
    assert {name: file_digest(folder / "out" / name) for name in note["digests"]} == note["digests"]
    assert len(note["matrices"]) == 3 * 7
    assert all(each["error"] < each["rounding_error"] for each in note["matrices"])
    assert not (folder / "out.unfinished").exists()
    assert result.bytes_after < result.bytes_before
    assert "held-out loss" in result_table(result)


def test_every_expert_is_rounded_and_the_router_is_left(mixture_int4: Any) -> None:
    folder, result = mixture_int4
    after = tensors_of(folder / "out")
    packed = [key for key in after if key.endswith("weight_packed")]
    assert sum(".experts." in key for key in packed) == 3 * 4 * 3
    assert not any("gate.weight" in key for key in packed)
    reasons = {reason for name, reason in result.left.items() if name.endswith("gate.weight")}
    assert reasons == {"chooses among experts, or has few rows"}
    config = json.loads((folder / "out" / "config.json").read_text())["quantization_config"]
    assert any(name.endswith("gate") for name in config["ignore"])
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64


def test_tokens_of_experts_are_those_that_were_sent_to_them(mixture: Path, mixture_int4: Any) -> None:
    """Routing of the first block by hand: each expert's sum is over its tokens that count."""
    folder, result = mixture_int4
    data = data_of(mixture, folder)
    stock = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32, experts_implementation="eager").eval()
    sent: list[Any] = []
    experts = stock.model.layers[0].mlp.experts
    experts.register_forward_hook(lambda own, args, out: sent.append((args[0], args[1])))
    expected = 0
    for rows in data.rows:
        if not rows.held_out:
            sent.clear()
            with torch.no_grad():
                stock(input_ids=rows.batch.input_ids, position_ids=rows.batch.position_ids)
            expected += int(rows.counts.flatten()[:, None].expand_as(sent[0][1]).sum())
    report = next(each for each in result.reports if each.name.endswith("layers.0.mlp.experts.gate_up_proj"))
    assert report.tokens == expected
    assert not report.unsorted


def firsts(rows: Any) -> torch.Tensor:
    """Return which tokens are the first of a sample."""
    if rows.batch.position_ids is not None:
        return (rows.batch.position_ids == 0) & (rows.batch.counted != 0)  # what fills a row has positions, too
    first = torch.zeros_like(rows.counts)
    first[:, 0] = True
    return first


def test_held_out_rows_are_no_calibration_rows(dense: Path, tmp_path: Path) -> None:
    data = data_of(dense, tmp_path)
    rows = {
        held: [tuple(ids.tolist()) for each in data.rows if each.held_out is held for ids in each.batch.input_ids]
        for held in (False, True)
    }
    assert rows[True]
    assert not set(rows[False]) & set(rows[True])
    for each in data.rows:
        mark, first = each.batch.input_ids == 0, firsts(each)
        assert bool(each.counts[first].all()), "heads attend to the first token where they have nothing to say"
        assert not bool((each.counts & mark & ~first).any()), "the mark of the end counts"


def test_texts_go_through_the_chat_template_of_which_only_first_tokens_count(dense: Path, tmp_path: Path) -> None:
    """Neither as an input of a matrix nor in the loss; and special tokens do not, whoever says them."""
    shutil.copytree(dense, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]: {{ m.content | trim }} </>{% endfor %}<eos>"
    tokenizer.save_pretrained(tmp_path / "model")
    data = data_of(tmp_path / "model", tmp_path)
    for each in data.rows:
        counted = each.counts & ~firsts(each)
        for ids, counts, labels in zip(each.batch.input_ids, counted, each.batch.labels, strict=True):
            pieces = ("".join(tokenizer.convert_ids_to_tokens(some)) for some in (ids, ids[counts], ids[~counts]))
            text, said, rest = pieces
            assert "[user]:" in text
            assert "times" in said
            assert not re.search(r"[\[\]<>]", said), said
            assert not re.search(r"times|makes", rest), rest
            assert bool((labels[~counts] == -100).all())


@pytest.mark.parametrize("interpreter", sampled(["overlapped", "plain"]))
def test_memory_for_few_sums_changes_no_byte(
    interpreter: str, mixture: Path, mixture_int4: tuple[Path, Compressed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[Quantiser]()

    def quantiser(*words: Any, **named: Any) -> Quantiser:
        made.append(Quantiser(*words, **named))
        return made[-1]

    monkeypatch.setattr(compression, "Quantiser", quantiser)
    monkeypatch.setattr(quantisers, "interpreter_of", lambda name, *more: interpreter_of(interpreter, *more))
    monkeypatch.setattr(room, "_LEAST_REST_BYTES", 3 << 14)
    run(mixture, tmp_path, group_size=64, host_memory="1MiB")
    assert files_of(tmp_path) == files_of(mixture_int4[0])
    (found,) = made
    assert not found.room.ahead
    assert len(build_block(found.program_figures(), 0, Snapshot())[0].lane(Lane.UPDATE)) > 2, "rows pass a block several times"


def test_a_block_of_which_nothing_is_coded_is_written_after_the_look_that_found_so() -> None:
    program, _ = build_block(ProgramFigures(blocks=[BlockFigures()], calibrating=2, held_out=1), 0, Snapshot())
    (look,), (keep,) = ([op for op in program.ops if op.verb is verb] for verb in (Verb.CATCH, Verb.KEEP))
    assert look.index in keep.after


def test_a_block_is_read_while_the_one_before_is_rounded() -> None:
    rounds = ProgramFigures(blocks=[BlockFigures(groups=[MatrixGroup()])] * 3, calibrating=2, held_out=1, ahead=True)
    first, left = build_block(rounds, 0, Snapshot())
    second, _ = build_block(rounds, 1, left)
    fetches, compute = [op for op in first.ops if op.verb is Verb.FETCH], first.lane(Lane.COMPUTE)
    assert [op.unit for op in fetches] == [1, 2]
    assert not set(fetches[1].after) & {op.index for op in compute}
    assert [op.unit for op in second.ops if op.verb is Verb.FETCH] == [3], "it has been read"
    (commit,) = first.lane(Lane.COMMIT)
    assert all(commit.index in op.after_previous for op in second.ops if op.verb is Verb.OUT), "it was needed"
    assert not any(commit.index in op.after_previous for op in second.ops if op.verb is Verb.CATCH)
