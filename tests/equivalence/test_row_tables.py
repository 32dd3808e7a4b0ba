"""Tables of rows beside feed-forward parts of a frozen base that is streamed: what a dense plain PyTorch module trains."""

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import FAR_PLACEMENTS, LENGTH, ROWS, SPLIT, batch_of, train
from safetensors.torch import load_file
from tiers import sampled
from torch import nn
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.merging import merge_adapters
from headrace.engine.trainer import Engine
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.whose_weights import open_whose_model
from headrace.peers.ranks.sharded import ShardedEngine
from headrace.terms.errors import ConfigError, ModelError
from headrace.terms.options.budget import Budget

LR, DECAY, STEPS = 1e-2, 0.1, 3
TABLE = "table:rows=36,layers=1+3,top=5"
WEIGHTS = "adapter_model.safetensors"


class DenseTable(nn.Module):
    """A feed-forward part and a table: all rows are scored against whole keys, and those below the best are masked."""

    def __init__(self, part: nn.Module, start: dict[str, torch.Tensor], top: int) -> None:
        super().__init__()
        self.part, self.top = part, top
        self.keys, self.values = (nn.Parameter(start[name].clone()) for name in ("keys", "values"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        side = self.keys.shape[1]
        whole = torch.cat([self.keys[0].repeat_interleave(side, 0), self.keys[1].repeat(side, 1)], dim=1)
        scores = inputs @ whole.T
        least = scores.topk(self.top, dim=-1).values[..., -1:]
        weights = scores.masked_fill(scores < least, -torch.inf).softmax(dim=-1)
        found: torch.Tensor = self.part(inputs) + weights @ self.values
        return found


def first_numbers(path: Path, run: Path, adapter: str) -> dict[str, torch.Tensor]:
    """Return the tensors of tables before any step."""
    with Engine.open(path, headrace.Options(output=run, adapter=adapter, compute_dtype="float32")) as engine:
        engine.save_pretrained(run / "first")
    return load_file(run / "first" / WEIGHTS)


def plain_run(path: Path, start: dict[str, torch.Tensor], top: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train().requires_grad_(False)
    tables = {}
    for name in {key.rpartition(".table.")[0] for key in start}:
        own = {key.removeprefix(f"{name}.table."): value for key, value in start.items() if key.startswith(f"{name}.")}
        tables[name] = DenseTable(model.get_submodule(name), own, top)
        model.set_submodule(name, tables[name])
    parameters = [each for table in tables.values() for each in (table.keys, table.values)]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    losses = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch_of(ROWS, LENGTH, seed)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, {
        f"{name}.table.{end}": getattr(table, end).detach() for name, table in tables.items() for end in ("keys", "values")
    }


def trained(path: Path, run: Path, adapter: str = TABLE, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    more = {"learning_rate": LR, "weight_decay": DECAY, "max_grad_norm": 0.5, "compute_dtype": "float32", **options}
    return train(path, run, steps=STEPS, adapter=adapter, **more)


@pytest.mark.parametrize(("name", "top"), sampled([("llama", 5), ("llama", 36), ("mixtral-aux", 5)], [("llama", 5)]))
def test_tables_are_what_a_dense_module_in_plain_pytorch_trains(
    name: str, top: int, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Beside a routed part, too; and with all rows for each token."""
    path, adapter = model_dir(name), f"table:rows=36,layers=1+3,top={top}"
    start = first_numbers(path, tmp_path / "start", adapter)
    expected, wanted = plain_run(path, start, top)
    losses, found = trained(path, tmp_path / "run", adapter, adjust=SPLIT)
    assert losses == pytest.approx(expected, rel=2e-6)
    assert found.keys() == wanted.keys() == {f"model.layers.{i}.mlp.table.{end}" for i in (1, 3) for end in ("keys", "values")}
    for key, want in wanted.items():  # in length: where gradients are near zero, Adam enlarges their last bits
        moved = (want - start[key]).norm()
        assert moved > 0.1
        assert (found[key] - want).norm() < 1e-3 * moved, f"{key} differs"


@pytest.mark.wide
@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"checkpoint_every": 2, "optimizer": "sgd:momentum=0.9"}, marks=pytest.mark.deep),
        pytest.param({"compute_dtype": "float16", "lr_schedule": "cosine", "max_steps": 9}, marks=pytest.mark.deep),
    ],
)
def test_rows_that_are_updated_when_they_are_read_have_the_bits_of_dense_updates(
    more: dict[str, Any], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Unclipped: squares of a norm are summed in another order. A large table, of which a step touches some rows."""
    path, adapter = model_dir("llama", "bfloat16"), "table:rows=1024,layers=1+3,top=2"
    found = {}
    for policy in ("exact", "dense"):
        options: dict[str, Any] = {"compute_dtype": "bfloat16", "max_grad_norm": None, "adjust": SPLIT, **more}
        found[policy] = trained(path, tmp_path / policy, f"{adapter},policy={policy}", **options)
    (losses, tensors), (expected, wanted) = found["exact"], found["dense"]
    assert losses == expected
    assert tensors.keys() == wanted.keys()
    for key, want in wanted.items():
        assert torch.equal(tensors[key], want), f"{key} differs"
        assert "keys" in key or 0 < (want != 0).any(dim=1).sum() < len(want), "some rows were read, and others never"


PLACEMENTS: dict[str, dict[str, Any]] = FAR_PLACEMENTS | {
    "guessing that nothing is clipped": {
        "adjust": {"update_policy": "speculative", "late_units": (2,), "resident_states": (), "speculation": None}
    },
}


@pytest.mark.wide
@pytest.mark.parametrize("placement", sampled(PLACEMENTS, list(PLACEMENTS)[1:]))
def test_placement_changes_nothing(placement: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, options = model_dir("llama", "bfloat16"), dict(PLACEMENTS[placement])
    losses, tensors = trained(path, tmp_path / "base", compute_dtype="bfloat16", adjust=SPLIT)
    more = options | {"adjust": SPLIT | options["adjust"]}
    again, others = trained(path, tmp_path / "other", compute_dtype="bfloat16", **more)
    assert again == losses
    for key, want in tensors.items():
        assert torch.equal(others[key], want), f"{key} differs"


@pytest.mark.wide
def test_what_is_saved_loads_with_its_own_module_and_answers(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """In plain PyTorch by the file beside the weights; generation from the files, from the run, and beside a model."""
    path, folder, seen = model_dir("llama"), tmp_path / "table", list[torch.Tensor]()
    ids = batch_of(2, LENGTH, 99)["input_ids"]
    look = {"inspect": lambda engine: seen.append(engine.next_logits({"input_ids": ids}))}
    trained(path, tmp_path / "run", export=folder, **look)
    assert "row_table.load(model, DIR)" in (folder / "README.md").read_text()
    spec = importlib.util.spec_from_file_location("row_table", folder / "row_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        base = model(ids).logits[:, -1]
        model = module.load(model, folder)
        torch.testing.assert_close(model(ids).logits[:, -1], seen[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(base, seen[0], atol=1e-3)
        want = model.generate(ids, max_new_tokens=6, do_sample=False)[:, LENGTH:].tolist()
    given = partial(open_whose_model, adapter=folder)
    places: list[tuple[Path, Any]] = [(folder, open_whose_model), (tmp_path / "run", GenerationModel.of_store), (path, given)]
    for place, opened in places:
        with Generator.open(place, Budget(host="4GiB"), compute_dtype="float32", opened=opened) as generator:
            found = dict(generator.generate(ids.tolist(), max_new_tokens=6, do_sample=False, eos_token_id=[]))
        assert [list(found[row]) for row in range(2)] == want, place.name
    with pytest.raises(ConfigError, match="a row table is no matrix"):
        merge_adapters(path, folder, tmp_path / "merged", {})
    assert not (tmp_path / "merged").exists()


@pytest.mark.wide
def test_a_rule_that_runs_clipped_steps_again_updates_rows_once(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, more = model_dir("llama"), {"optimizer": "lomo", "learning_rate": 1.0, "max_grad_norm": 1e-3}
    losses, tensors = trained(path, tmp_path / "exact", f"{TABLE},policy=exact", **more)
    expected, wanted = trained(path, tmp_path / "dense", f"{TABLE},policy=dense", **more)
    assert losses == pytest.approx(expected, rel=1e-6)
    for key, want in wanted.items():
        torch.testing.assert_close(tensors[key], want, rtol=1e-4, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
    with pytest.raises(ConfigError, match="table: updates of Adafactor cannot be replayed row by row"):
        trained(path, tmp_path / "refused", optimizer="adafactor")


@pytest.mark.wide
def test_a_run_goes_on_with_its_tables(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path = model_dir("llama")
    more: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB"}
    options = headrace.Options(output=tmp_path / "run", adapter=TABLE, learning_rate=LR, **more)
    with Engine.open(path, options) as engine:
        engine.step(batch_of(ROWS, LENGTH, 0))
    files = sorted(path.name for path in (tmp_path / "run").glob("headrace-*/rows.*"))
    assert files == ["rows.2", "rows.4"]
    with Engine.resume(tmp_path / "run") as engine:
        engine.step(batch_of(ROWS, LENGTH, 1))
        engine.save_pretrained(tmp_path / "resumed")
    with Engine.open(path, replace(options, output=tmp_path / "unbroken")) as engine:
        for seed in range(2):
            moved = engine.step(batch_of(ROWS, LENGTH, seed)).bytes_read
        assert moved["ssd"] >= 2 * 2 * 4096, "pages of both tables, in both places"
        engine.save_pretrained(tmp_path / "out")
        engine.remove_state()
    assert not list((tmp_path / "unbroken").glob("headrace-*"))
    assert (tmp_path / "resumed" / WEIGHTS).read_bytes() == (tmp_path / "out" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("table:rows=65535", "rows: 65535 is no square; give 65025 or 65536"),
        ("table:rows=16", "top: 32 rows for each token, but there are 16; give at most as many"),
        ("table:layers=1+4", "layers: there is no block 4; the model has blocks 0 to 3"),
        ("table:layers=1-3", "layers: '1-3' are no numbers of blocks; join them with +, from 0"),
        ("table:layers=0", "block 0 (Mamba2Block) has no feed-forward part in a module of its own"),
    ],
)
def test_what_has_no_place_is_said_before_anything_is_written(
    adapter: str, said: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = model_dir("mamba2" if "Mamba2" in said else "llama")
    with pytest.raises(ConfigError, match=re.escape(said)):
        Engine.open(model, headrace.Options(output=tmp_path / "run", adapter=adapter))
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
def test_rows_that_do_not_catch_up_train_another_table(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, adapter = model_dir("llama"), "table:rows=1024,layers=1,top=2"
    losses, tensors = trained(path, tmp_path / "exact", adapter)
    again, others = trained(path, tmp_path / "lazy", f"{adapter},policy=lazy")
    assert again[:2] == losses[:2], "until a row has missed an update"
    assert not torch.equal(others["model.layers.1.mlp.table.values"], tensors["model.layers.1.mlp.table.values"])


@pytest.mark.wide
def test_ranks_do_not_share_out_rows() -> None:
    with pytest.raises(ConfigError, match="ranks do not share out rows; give policy=dense, or train on one machine"):
        ShardedEngine.open("nothing is read", headrace.Options(adapter=TABLE))


def test_tables_of_another_model_are_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "table"
    trained(model_dir("llama"), tmp_path / "run", export=folder)
    with pytest.raises(ModelError, match=r"model\.layers\.\d\.mlp is no part of a block of GPT2LMHeadModel; give the model"):
        open_whose_model(model_dir("gpt2-dropout"), Budget(host="4GiB"), None, None, adapter=folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"top": None}))
    with pytest.raises(ModelError, match=r"expected tables of one shape and their `top`, found .*None"):
        open_whose_model(model_dir("llama"), Budget(host="4GiB"), None, None, adapter=folder)
