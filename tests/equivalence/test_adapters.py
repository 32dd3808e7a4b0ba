"""Adapters beside a frozen base that is streamed: what plain PyTorch trains, wherever things live, in peft's own files."""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import LENGTH, ROWS, SPLIT, batch_of, train
from safetensors.torch import load_file
from tiers import sampled
from torch import nn
from transformers import AutoModelForCausalLM

import headrace
from headrace.engine.merging import merge_adapters
from headrace.engine.seams import Seams
from headrace.engine.trainer import Engine
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.passes.whose_weights import open_whose_model
from headrace.terms.errors import ConfigError, InputError, ModelError, RunDirectoryError
from headrace.terms.families import STATES, TRAINED, WEIGHTS, Durability
from headrace.terms.options.adapter import adapter_of
from headrace.terms.options.budget import Budget
from headrace.testing import GroupedCodec
from headrace.update.wires import AdapterWire, FrozenWire

LR, DECAY, STEPS, ALPHA = 1e-2, 0.1, 3, 8.0


class Adapted(nn.Module):
    """A frozen linear module with LoRA or DoRA, from the papers' formulas; `start` has the first numbers."""

    def __init__(self, base: nn.Linear, start: dict[str, torch.Tensor], *, dora: bool) -> None:
        super().__init__()
        self.base, self.dora = base.requires_grad_(False), dora
        self.down = nn.Parameter(start["lora_A.weight"].clone())
        self.up = nn.Parameter(torch.zeros(base.out_features, len(self.down)))
        self.length = nn.Parameter(base.weight.detach().norm(dim=1)) if dora else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.base.weight + ALPHA / len(self.down) * self.up @ self.down
        if self.length is not None:
            weight = (self.length / weight.detach().norm(dim=1))[:, None] * weight
        return nn.functional.linear(inputs, weight, self.base.bias)


class AdaptedExperts(nn.Module):
    """A parametrization of packed experts: each matrix and its own B A; where `ours` lies as inputs x outputs, transposed."""

    def __init__(self, ours: torch.Tensor, start: torch.Tensor, *, transposed: bool) -> None:
        super().__init__()
        experts, rows, _ = ours.mT.shape if transposed else ours.shape
        self.experts, self.transposed, self.rank = experts, transposed, len(start) // experts
        self.down = nn.Parameter(start.clone())
        self.up = nn.Parameter(torch.zeros(rows, len(start)))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        found = []
        for expert in range(self.experts):
            down = self.down[expert * self.rank : (expert + 1) * self.rank]
            own = ALPHA / self.rank * self.up[:, expert :: self.experts] @ down
            found.append(weight[expert] + (own.T if self.transposed else own))
        return torch.stack(found)


def first_numbers(path: Path, run: Path, adapter: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter before any step."""
    with Engine.open(path, headrace.Options(output=run, adapter=adapter, compute_dtype="float32")) as engine:
        engine.save_pretrained(run / "first")
    return load_file(run / "first" / "adapter_model.safetensors")


def plain_run(path: Path, start: dict[str, torch.Tensor], *, dora: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train().requires_grad_(False)
    adapted = {}
    for name, module in list(model.named_modules()):
        own = {key.removeprefix(f"base_model.model.{name}."): value for key, value in start.items() if f".{name}." in key}
        if own and isinstance(module, nn.Linear):
            adapted[name] = Adapted(module, own, dora=dora)
            model.set_submodule(name, adapted[name])
        # peft wraps a module of experts once for each of its parameters; the last one is outermost.
        for parameter, key in (("gate_up_proj", "base_layer.lora_A.weight"), ("down_proj", "lora_A.weight")) if own else ():
            if name.endswith("experts"):
                matrices = getattr(module, parameter)
                wrapped = AdaptedExperts(matrices, own[key], transposed=module.is_transposed)
                nn.utils.parametrize.register_parametrization(module, parameter, wrapped, unsafe=True)
                adapted[f"{name}{'.base_layer' if 'base' in key else ''}"] = wrapped
    decayed = [p for each in adapted.values() for p in (each.down, each.up)]
    lengths = [each.length for each in adapted.values() if getattr(each, "length", None) is not None]
    optimizer = torch.optim.AdamW([*decayed, *lengths], weight_decay=DECAY, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        with nn.utils.parametrize.cached():
            loss = model(**batch_of(ROWS, LENGTH, seed)).loss
        loss.backward()
        nn.utils.clip_grad_norm_([*decayed, *lengths], 0.5)
        optimizer.step()
        losses.append(loss.item())
    names = {"down": "lora_A.weight", "up": "lora_B.weight", "length": "lora_magnitude_vector"}
    found = {
        f"base_model.model.{name}.{end}": getattr(each, own).detach()
        for name, each in adapted.items()
        for own, end in names.items()
        if getattr(each, own, None) is not None
    }
    return losses, found


def trained(path: Path, run: Path, adapter: str, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    more = {"learning_rate": LR, "weight_decay": DECAY, "max_grad_norm": 0.5, "compute_dtype": "float32", **options}
    return train(path, run, steps=STEPS, adapter=adapter, **more)


@pytest.mark.parametrize("kind", sampled(["lora", "dora", "lora+head"]))
def test_adapters_are_what_plain_pytorch_trains(kind: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    kind, head = kind.removesuffix("+head"), kind.endswith("+head")
    path = model_dir("llama")
    adapter = f"{kind}:rank=4,alpha=8" + (",target_modules=up_proj+lm_head" if head else "")
    start = first_numbers(path, tmp_path / "start", adapter)
    expected, wanted = plain_run(path, start, dora=kind == "dora")
    losses, found = trained(path, tmp_path / "run", adapter, adjust=SPLIT)
    assert losses == pytest.approx(expected, rel=2e-6)
    assert found.keys() == wanted.keys()
    assert any("up_proj" in name for name in found)
    assert any("lm_head" in name for name in found) == head
    for name, want in wanted.items():
        torch.testing.assert_close(found[name], want, rtol=1e-3, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["mixtral-aux", pytest.param("gpt-oss", marks=pytest.mark.deep)])
def test_packed_experts_have_adapters_of_their_own(name: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Each expert's matrix and its own product; in gpt-oss they lie as inputs x outputs."""
    path, adapter = model_dir(name), "lora:rank=4,alpha=8,target_modules=q_proj+experts"
    start = first_numbers(path, tmp_path / "start", adapter)
    expected, wanted = plain_run(path, start, dora=False)
    losses, found = trained(path, tmp_path / "run", adapter, adjust=SPLIT)
    assert losses == pytest.approx(expected, rel=2e-6)
    assert found.keys() == wanted.keys()
    assert sum("experts" in key for key in found) == 2 * sum("q_proj" in key for key in found)
    for key, want in wanted.items():  # a hundredth of a step: where gradients are near zero, Adam enlarges their last bits
        torch.testing.assert_close(found[key], want, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def merged_like_adapted(path: Path, folder: Path, adapter: str) -> tuple[Any, torch.Tensor]:
    """Train into `folder`, and check that the merged model has the logits of the adapted one, and so has stock peft; return the
    merged model and the tokens.
    """
    seen: list[torch.Tensor] = []
    ids = batch_of(2, LENGTH, 99)["input_ids"]
    trained(
        path,
        folder / "run",
        adapter,
        export=folder / "adapter",
        inspect=lambda engine: seen.append(engine.next_logits({"input_ids": ids})),
    )
    merge_adapters(path, folder / "adapter", folder / "merged", {})
    model = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[:, -1], seen[0], rtol=1e-4, atol=1e-5)
        assert not torch.allclose(base(ids).logits[:, -1], seen[0], atol=1e-3)
    from peft import PeftModel  # takes two seconds to import

    adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits[:, -1], seen[0], rtol=1e-4, atol=1e-5)
    return model, ids


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("mixtral-aux", "q_proj+experts"),
        pytest.param("gpt-oss", "down_proj", marks=pytest.mark.deep),
        pytest.param("mixtral-aux", "gate_up_proj", marks=pytest.mark.deep),
    ],
)
def test_merged_experts_give_the_logits_of_adapted_ones(
    name: str, modules: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """And stock peft over the same files; and answers are those of the merged model."""
    path = model_dir(name)
    model, ids = merged_like_adapted(path, tmp_path, f"lora:rank=4,alpha=8,target_modules={modules}")
    with torch.no_grad():
        want = model.generate(ids, max_new_tokens=6, do_sample=False)[:, LENGTH:].tolist()
    given = partial(open_whose_model, adapter=tmp_path / "adapter")
    with Generator.open(path, Budget(host="4GiB"), compute_dtype="float32", opened=given) as generator:
        found = dict(generator.generate(ids.tolist(), max_new_tokens=6, do_sample=False, eos_token_id=[]))
    assert [list(found[row]) for row in range(2)] == want


PLACEMENTS: dict[str, dict[str, Any]] = {
    "SSD, plain": {
        "adjust": {"chunk_elements": 2048, "resident_states": (), "host_slots": 2, "prefetch": 1},
        "interpreter": "plain",
    },
    "a device, late, states in memory": {
        "adjust": {"update_policy": "deferred", "late_units": lambda plan: plan.trained_units, "host_slots": 4}
        | {"resident_states": lambda plan: plan.trained_units},
        "device_memory": "1GiB",
    },
}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "modules"),
    [("llama", ("q_proj", "down_proj", "lm_head")), pytest.param("mixtral-aux", ("q_proj", "experts"), marks=pytest.mark.deep)],
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_changes_nothing(
    placement: str, name: str, modules: tuple[str, ...], model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Dropout, some modules, 16 bits: adapters end with the same bits wherever weights, states and gradients live."""
    path, options = model_dir(name, "bfloat16"), dict(PLACEMENTS[placement])
    adapter = f"lora:rank=4,target_modules={'+'.join(modules)}" + ("" if "experts" in modules else ",dropout=0.1")
    more: dict[str, Any] = {"compute_dtype": "bfloat16", "max_grad_norm": 0.5}
    losses, tensors = trained(path, tmp_path / "base", adapter, adjust=SPLIT, **more)
    assert all(any(f".{module}." in key for key in tensors) for module in modules)
    again, others = trained(path, tmp_path / "other", adapter, **more | options | {"adjust": SPLIT | options["adjust"]})
    assert again == losses
    for key, want in tensors.items():
        assert torch.equal(others[key], want), f"{key} differs"


def where_weights_lie(seen: list[list[Durability]]) -> Callable[[Engine], None]:
    return lambda engine: seen.append([unit.weights.durability for unit in engine.store.manifest.units])


@pytest.mark.wide
@pytest.mark.parametrize("device", [None, pytest.param("1GiB", marks=pytest.mark.deep)])
def test_a_base_that_is_read_in_the_models_files_gives_the_bits_of_a_copy(
    device: str | None, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """On the model's own drive nothing is copied; two directories for the state get a copy. A device wants borders of 64 bytes,
    which a file may lack.
    """
    path, adapter = model_dir("llama", "bfloat16"), "dora:rank=4"
    seen: list[list[Durability]] = []
    more: dict[str, Any] = {"compute_dtype": "bfloat16", "device_memory": device, "adjust": SPLIT}
    losses, tensors = trained(path, tmp_path / "lent", adapter, inspect=where_weights_lie(seen), **more)
    two = tuple(tmp_path / name for name in ("one", "two"))
    for each in two:
        each.mkdir()
    again, others = trained(path, tmp_path / "copied", adapter, ssd=two, inspect=where_weights_lie(seen), **more)
    assert again == losses
    for name, want in tensors.items():
        assert torch.equal(others[name], want), f"{name} differs"
    assert device is not None or set(seen[0]) == {Durability.LENT}
    assert set(seen[1]) == {Durability.ONCE}


def test_weights_of_another_dtype_are_copied(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    seen: list[list[Durability]] = []
    trained(model_dir("llama", "bfloat16"), tmp_path / "run", "lora:rank=4", inspect=where_weights_lie(seen))
    assert set(seen[0]) == {Durability.ONCE}


@pytest.mark.wide
def test_a_base_that_changed_since_the_run_began_is_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_dir("llama", "bfloat16"), model)
    options = headrace.Options(output=tmp_path / "run", adapter="lora:rank=4", host_memory="4GiB")
    with Engine.open(model, options) as engine:
        engine.step(batch_of(ROWS, LENGTH, 0))
    with Engine.resume(tmp_path / "run") as engine:
        engine.step(batch_of(ROWS, LENGTH, 1))
    weights = model / "model.safetensors"
    os.utime(weights)
    with pytest.raises(RunDirectoryError, match=r"model\.safetensors: changed since the run began"):
        Engine.resume(tmp_path / "run")
    weights.unlink()
    with pytest.raises(InputError, match="model"):
        Engine.resume(tmp_path / "run")


@pytest.mark.wide
@pytest.mark.parametrize("name", sampled(["llama", "gpt2-dropout"], ["gpt2-dropout"]))
def test_a_merged_model_gives_the_logits_of_the_adapted_one(name: str, model_dir: Callable[..., Path], tmp_path: Path) -> None:
    """Conv1D, whose matrices lie the other way, too; and stock peft over the same files."""
    path = model_dir(name)
    adapter = "dora:rank=4,alpha=8,target_modules=q_proj+up_proj+lm_head" if name == "llama" else "lora:rank=4,alpha=8"
    model, ids = merged_like_adapted(path, tmp_path, adapter)
    with torch.no_grad():
        want = model.generate(ids, max_new_tokens=6, do_sample=False)[:, LENGTH:].tolist()
    # The directory of adapters names its model; the run is unfinished; a directory and adapters are given.
    given = partial(open_whose_model, adapter=tmp_path / "adapter")
    places: list[tuple[Path, Any]] = [
        (tmp_path / "adapter", open_whose_model),
        (tmp_path / "run", GenerationModel.of_store),
        (path, given),
    ]
    for place, opened in places:
        with Generator.open(place, Budget(host="4GiB"), compute_dtype="float32", opened=opened) as generator:
            found = dict(generator.generate(ids.tolist(), max_new_tokens=6, do_sample=False, eos_token_id=[]))
        assert [list(found[row]) for row in range(2)] == want, place.name


@pytest.mark.wide
def test_a_run_goes_on_with_its_adapters(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    path, adapter = model_dir("llama"), "dora:rank=4,target_modules=q_proj+lm_head"
    more: dict[str, Any] = {"tokens_per_step": ROWS * LENGTH, "sequence_length": LENGTH, "host_memory": "4GiB"}
    options = headrace.Options(output=tmp_path / "run", adapter=adapter, learning_rate=LR, max_grad_norm=0.5, **more)
    with Engine.open(path, options) as engine:
        engine.step(batch_of(ROWS, LENGTH, 0))
        families = [[family.name for family in unit.families] for unit in engine.store.manifest.units]
        assert families == [[WEIGHTS], *[[WEIGHTS, TRAINED, STATES]] * 5]
    with pytest.raises(RunDirectoryError, match="wire: the run was begun with dora:rank=4,target_modules"):
        Engine.resume(tmp_path / "run", seams=Seams())
    with Engine.resume(tmp_path / "run") as engine:
        engine.step(batch_of(ROWS, LENGTH, 1))
        engine.save_pretrained(tmp_path / "resumed")
    with Engine.open(path, replace(options, output=tmp_path / "unbroken")) as engine:
        for seed in range(2):
            engine.step(batch_of(ROWS, LENGTH, seed))
        engine.save_pretrained(tmp_path / "out")
    name = "adapter_model.safetensors"
    assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.deep  # tests/compress has codes that are published
@pytest.mark.parametrize(
    ("name", "adapter"), [("llama", "lora:rank=4"), ("mixtral-aux", "lora:rank=4,target_modules=q_proj+experts")]
)
def test_upon_coded_weights_gradients_are_those_upon_decoded_ones(
    name: str, adapter: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    """Forward, recompute and gradients of inputs read the coded plane: bit for bit as with the weights that it stands for."""
    path = model_dir(name, "bfloat16")
    with Engine.open(path, headrace.Options(output=tmp_path / "code"), seams=Seams(FrozenWire(), GroupedCodec())) as engine:
        engine.save_pretrained(tmp_path / "decoded")
    more: dict[str, Any] = {"compute_dtype": "bfloat16", "adjust": SPLIT}
    losses, tensors = trained(tmp_path / "decoded", tmp_path / "plain", adapter, **more)
    seams = Seams(AdapterWire(adapter_of(adapter)), GroupedCodec())
    again, others = trained(path, tmp_path / "coded", "lora:rank=4", seams=seams, **more)
    assert again == losses
    for key, want in tensors.items():
        assert torch.equal(others[key], want), f"{key} differs"


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        ("dora:target_modules=q_proj+experts", "dora: model.layers.0.mlp.experts.gate_up_proj are packed experts"),
        ("lora:rank=65,target_modules=experts", "rank 65 is more than model.layers.0.mlp.experts.gate_up_proj has"),
        ("lora:dropout=0.1,target_modules=experts", "experts.gate_up_proj are packed experts, whose adapters have no dropout"),
        ("lora:rank=65", "rank 65 is more than model.layers.0.self_attn.q_proj has: it is 64 x 64"),
        ("lora:target_modules=q_proj+w1", "'w1' is none; linear modules are down_proj, gate_proj, k_proj"),
        ("lora:exclude_modules=q_proj+w1", "exclude_modules: 'w1' is no module that could be adapted; there are down_proj"),
        (
            "lora:target_modules=q_proj,exclude_modules=self_attn.q_proj",
            "exclude_modules leaves no module that could be adapted",
        ),
        ("lora:target_modules=+", "'+' names no module; join names with +"),
        ("lora:target_modules=lm_head", "'lm_head' shares its matrix with the embedding; heads that are tied get no adapters"),
        (
            "lora:target_modules=embed_tokens",
            "'embed_tokens' is no linear module of a block or a head; --gradient lsp trains it",
        ),
        ("dora:dropout=0.1", "dora: dropout: dora has none"),
        ("ia3", "'ia3' is not one of lora, dora"),
    ],
)
def test_what_cannot_be_adapted_is_said_before_anything_is_written(
    adapter: str, said: str, model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    model = model_dir("mixtral-aux" if "experts" in said else "gpt2-dropout" if "shares" in said else "llama")
    with pytest.raises(ConfigError, match=re.escape(said)):
        Engine.open(model, headrace.Options(output=tmp_path / "run", adapter=adapter))
    assert not (tmp_path / "run").exists()


@pytest.mark.wide
def test_an_adapter_of_another_model_is_refused(model_dir: Callable[..., Path], tmp_path: Path) -> None:
    trained(model_dir("llama"), tmp_path / "run", "lora:rank=4", export=tmp_path / "adapter")
    with pytest.raises(
        ModelError, match=r"belongs to nothing in the blocks of GPT2LMHeadModel\. The adapter is of another model"
    ):
        merge_adapters(model_dir("gpt2-dropout"), tmp_path / "adapter", tmp_path / "out", {})
    assert not (tmp_path / "out").exists()
