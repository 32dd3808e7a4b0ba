"""Adapters that stock peft wrote: computed as stock peft computes them when it loads the files, or refused by name."""

import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain
from transformers import AutoModelForCausalLM

from headrace.engine.merging import merge_adapters
from headrace.generate.passes.generator import Generator
from headrace.generate.passes.whose_weights import open_whose_model
from headrace.model import Chain, Checkpoint
from headrace.model.adapters.adapter_config import COMPUTED, IRRELEVANT, KEEPS_WEIGHTS, REFUSED, AdapterConfig
from headrace.model.adapters.adapter_reading import read_adapters
from headrace.model.adapters.adapters import Adapters
from headrace.model.seats.generation_check import ready_to_generate
from headrace.model.seats.generation_costs import generation_costs
from headrace.terms.errors import ModelError
from headrace.terms.options.adapter import adapter_of
from headrace.terms.options.budget import Budget
from headrace.terms.options.optimizer import Optimizer

IDS = torch.randint(2, 160, (2, 12), generator=torch.Generator().manual_seed(4))
_MADE: dict[str, Path] = {}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that makes (once) the directory of a tiny model."""

    def make(name: str) -> Path:
        if name not in _MADE:
            _MADE[name] = tmp_path_factory.mktemp("models") / name
            make_plain(make_config(CONFIGS[name])).eval().save_pretrained(_MADE[name])
        return _MADE[name]

    yield make
    _MADE.clear()


def stock(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def written_by_peft(path: Path, out: Path, **settings: Any) -> Path:
    """Write the files of an adapter with random numbers, by stock peft."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(stock(path), LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(out)
    return out


def logits_of_peft(path: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(stock(path), adapter).eval()(IDS).logits


def our_logits(path: Path, adapter: Path) -> torch.Tensor:
    """The stock model with what we read of the adapter."""
    checkpoint = Checkpoint.open(path)
    chain = Chain.from_config(checkpoint.config, "float32", Optimizer())
    stored = read_adapters(adapter, chain, chain.attach(checkpoint))
    stored.bind(torch.device("cpu"))
    model = stock(path)
    stored.adapters.install(model)
    with torch.no_grad():
        return model(IDS).logits


def changed(adapter: Path, **changes: Any) -> Path:
    """Change what the configuration of an adapter says."""
    place = adapter / "adapter_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | changes))
    return adapter


def check(path: Path, adapter: Path) -> None:
    want = logits_of_peft(path, adapter)
    with torch.no_grad():
        assert (stock(path)(IDS).logits - want).abs().max() > 1e-3, "the adapter does something"
    torch.testing.assert_close(our_logits(path, adapter), want, rtol=1e-4, atol=1e-5)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "of two modules": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "scaled by the root of the rank": ("llama", {"use_rslora": True, "target_modules": "all-linear"}),
    "with ranks and scales of some": (
        "llama",
        {
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"layers.0.self_attn.q_proj": 2, r"model\.layers\.[12]\.mlp\.up_proj": 8},
            "alpha_pattern": {"up_proj": 3, "q_proj": 5},
        },
    ),
    "with ranks, by their root": ("llama", {"target_modules": ["q_proj"], "rank_pattern": {"q_proj": 3}, "use_rslora": True}),
    "by an expression": ("llama", {"target_modules": r".*\.layers\.[02]\..*(q|down)_proj"}),
    "without some": ("llama", {"target_modules": "all-linear", "exclude_modules": ["k_proj", "layers.1.mlp.up_proj"]}),
    "without some by an expression": (
        "llama",
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.1\..*"},
    ),
    "of one layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": 1}),
    "of layers in a list": ("gpt2", {"target_modules": ["c_attn"], "layers_to_transform": [0, 2], "layers_pattern": "h"}),
    "with lengths of rows": ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "use_rslora": True}),
    "of a head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "whose matrices lie the other way": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "of a parameter of a linear module": ("llama", {"target_modules": [], "target_parameters": ["up_proj.weight"]}),
    "of packed experts": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "down_proj"]},
    ),
    "of a router": ("mixtral", {"target_modules": [], "target_parameters": ["gate.weight", "experts.down_proj"]}),
    "of names before transformers 5": ("qwen3-moe", {"target_modules": ["gate_proj", "up_proj", "down_proj", "gate"]}),
    "of all linear modules of a mixture": ("qwen3-moe", {"target_modules": "all-linear"}),
    "of experts that lie the other way": ("gpt-oss", {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
    **{
        f"begun by {first}": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": first})
        for first in KEEPS_WEIGHTS
        if first is not None and first != "lora_ga"
    },
}
QUICK = [name for name in VARIANTS if not name.startswith("begun by") and "expression" not in name]


@pytest.mark.parametrize("variant", sampled(VARIANTS, QUICK))
def test_an_adapter_of_peft_computes_what_peft_computes(variant: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    name, values = VARIANTS[variant]
    check(model_of(name), written_by_peft(model_of(name), tmp_path / "adapter", **values))


@pytest.mark.parametrize("variant", sampled(VARIANTS, ["of packed experts", "of names before transformers 5"]))
def test_and_the_merged_model_too(variant: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    name, values = VARIANTS[variant]
    path = model_of(name)
    adapter = written_by_peft(path, tmp_path / "adapter", **values)
    merge_adapters(path, adapter, tmp_path / "merged", {})
    with torch.no_grad():
        merged = stock(tmp_path / "merged")(IDS).logits
    torch.testing.assert_close(merged, logits_of_peft(path, adapter), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", sampled(["of names before transformers 5", "with ranks and scales of some"]))
def test_answers_are_those_of_peft(variant: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Packed experts are then read with their whole blocks, and the plan counts their sums."""
    from peft import PeftModel

    name, values = VARIANTS[variant]
    path = model_of(name)
    adapter = written_by_peft(path, tmp_path / "adapter", **values)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        stocks = PeftModel.from_pretrained(stock(path), adapter).eval()
        want = stocks.generate(input_ids=IDS, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
    given = partial(open_whose_model, adapter=adapter)
    with Generator.open(path, Budget(host="4GiB"), compute_dtype="float32", opened=given) as generator:
        found = dict(generator.generate(IDS.tolist(), max_new_tokens=6, do_sample=False, eos_token_id=[]))
    assert [list(found[row]) for row in range(2)] == want[:, IDS.shape[1] :].tolist()


@pytest.mark.wide
def test_plans_of_generations_count_what_adapters_add() -> None:
    """The sum of experts' matrices and their adapters, of a block that has such, too, where another has none."""
    kind, values = CONFIGS["mixtral"]
    config = make_config((kind, {**values, "hidden_size": 64, "intermediate_size": 128}))
    workspace = []
    for adapter in ("q_proj", "layers.2.mlp.experts.down_proj", "experts"):
        chain = Chain.from_config(config, "float32", Optimizer())
        ready_to_generate(chain.model)
        settings = adapter_of(f"lora:rank=4,target_modules={adapter}")
        adapters = Adapters.of(chain.model, chain.layouts, chain.num_blocks, settings)
        with chain.adapted(adapters):
            for unit, layout in adapters.layouts.items():
                adapters.bind(unit, layout, torch.zeros(layout.num_elements), None)
            workspace.append(generation_costs(chain, 1, 8).next.workspace_bytes)
    matrix = 4 * 4 * 64 * 128
    assert workspace[1] >= workspace[0] + matrix
    assert workspace[2] >= workspace[0] + 3 * matrix


def by_expert(path: Path, out: Path, names: Mapping[str, tuple[int, int]], place: str, **settings: Any) -> Path:
    """Write an adapter as peft did before transformers 5: one LoRA for each expert's Linear."""
    torch.manual_seed(3)
    tensors = {}
    for layer in range(3):
        for expert in range(4):
            for name, (rows, columns) in names.items():
                stem = f"base_model.model.model.layers.{layer}.{place}.{expert}.{name}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(4, columns) * 0.2
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, 4) * 0.2
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6, "target_modules": [*names]}
    (out / "adapter_config.json").write_text(json.dumps(config | settings))
    return out


QWEN = {"gate_proj": (24, 32), "up_proj": (24, 32), "down_proj": (32, 24)}
MIXTRAL = {"w1": (48, 32), "w3": (48, 32), "w2": (32, 48)}


@pytest.mark.parametrize(
    ("name", "shapes", "place", "settings"),
    [
        ("qwen3-moe", QWEN, "mlp.experts", {}),
        ("mixtral", MIXTRAL, "block_sparse_moe.experts", {}),
        ("qwen3-moe", QWEN, "mlp.experts", {"target_modules": r".*experts.*\.(gate|up|down)_proj"}),
        ("qwen3-moe", {"down_proj": QWEN["down_proj"]}, "mlp.experts", {"use_rslora": True}),
    ],
    ids=["qwen3-moe", "mixtral", "by an expression", "by the root of the rank"],
)
def test_one_adapter_for_each_experts_linear_is_read_as_peft_converts_it(
    name: str, shapes: Any, place: str, settings: dict[str, Any], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    check(model_of(name), by_expert(model_of(name), tmp_path / "adapter", shapes, place, **settings))


def test_dense_parts_that_peft_drops_are_computed(tmp_path: Path) -> None:
    """peft takes gate_proj for experts alone, and drops that of a dense block; the adapter was trained with it."""
    path, adapter = tmp_path / "model", tmp_path / "adapter"
    make_plain(make_config(CONFIGS["qwen3-moe-routed"])).eval().save_pretrained(path)
    by_expert(path, adapter, QWEN, "mlp.experts")
    file = adapter / "adapter_model.safetensors"
    tensors = {key: tensor for key, tensor in load_file(file).items() if ".layers.1." not in key}
    for name, (rows, columns) in {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}.items():
        stem = f"base_model.model.model.layers.1.mlp.{name}"
        tensors |= {f"{stem}.lora_A.weight": torch.randn(4, columns), f"{stem}.lora_B.weight": torch.randn(rows, 4) * 0.1}
    save_file(tensors, file)
    weights = load_file(path / "model.safetensors")
    for key in [key for key in tensors if key.endswith("lora_A.weight")]:
        stem = key.removesuffix(".lora_A.weight")
        weights[f"{stem.removeprefix('base_model.model.')}.weight"] += 6 / 4 * tensors[f"{stem}.lora_B.weight"] @ tensors[key]
    shutil.copytree(path, tmp_path / "summed")
    save_file(weights, tmp_path / "summed" / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        want = stock(tmp_path / "summed")(IDS).logits
    torch.testing.assert_close(our_logits(path, adapter), want, rtol=1e-4, atol=1e-5)


def test_experts_that_lack_an_adapter_are_refused(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = by_expert(model_of("qwen3-moe"), tmp_path / "adapter", QWEN, "mlp.experts")
    file = adapter / "adapter_model.safetensors"
    save_file({key: tensor for key, tensor in load_file(file).items() if ".experts.2.up" not in key}, file)
    with pytest.raises(ModelError, match=r"experts\.0\.up_proj: 3 of 4 experts have adapters"):
        our_logits(model_of("qwen3-moe"), adapter)


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"alpha_pattern": {"up_proj": 3}}, {"rank_pattern": {"2.up_proj": 2}}]
)
def test_experts_of_other_scales_are_refused(settings: dict[str, Any], model_of: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = by_expert(model_of("qwen3-moe"), tmp_path / "adapter", QWEN, "mlp.experts", **settings)
    with pytest.raises(ModelError, match="ranks or scales differ"):
        our_logits(model_of("qwen3-moe"), adapter)


def test_a_copy_of_the_head_is_passed_over_and_another_head_refused(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    path, adapter = model_of("llama"), tmp_path / "adapter"
    written_by_peft(path, adapter, target_modules=["q_proj", "lm_head"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.lm_head.base_layer.weight"
    assert key in tensors, "peft saves it"
    check(path, adapter)
    save_file(tensors | {key: tensors[key] * 1.01}, file)
    with pytest.raises(ModelError, match=r"lm_head\.base_layer\.weight: this adapter has other weights for lm_head\.weight"):
        our_logits(path, adapter)


def renamed(adapter: Path, name: str, share: str = "") -> Path:
    """Put an adapter's name into the keys that contain `share`, as the state of peft's own model has it."""
    file = adapter / "adapter_model.safetensors"
    tensors = {
        re.sub(r"(lora_[AB])\.weight$|(lora_magnitude_vector)$", rf"\g<1>\g<2>.{name}.weight", key)
        if share in key
        else key: each
        for key, each in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return adapter


@pytest.mark.parametrize("variant", ["with lengths of rows", "of a head", "of packed experts"])
def test_keys_with_the_name_of_their_adapter_are_read(variant: str, model_of: Callable[[str], Path], tmp_path: Path) -> None:
    name, settings = VARIANTS[variant]
    adapter = written_by_peft(model_of(name), tmp_path / "adapter", **settings)
    want = logits_of_peft(model_of(name), adapter)
    torch.testing.assert_close(our_logits(model_of(name), renamed(adapter, "default")), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits_of_peft(model_of(name), adapter), want)


def test_the_name_may_be_any_one_but_not_two(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = model_of("llama")
    adapter = written_by_peft(path, tmp_path / "adapter", target_modules=["q_proj"])
    want = our_logits(path, adapter)
    torch.testing.assert_close(our_logits(path, renamed(adapter, "mine")), want, rtol=0, atol=0)
    written_by_peft(path, adapter, target_modules=["q_proj"])
    with pytest.raises(ModelError, match=r"lora_[AB]\..*are of two adapters, by the names in their keys; save one"):
        our_logits(path, renamed(adapter, "mine", share="layers.1"))


def test_each_key_of_the_installed_peft_is_known() -> None:
    """One that is new in peft is to be computed, found irrelevant, or refused: the tables say which."""
    from peft import LoraConfig

    keys = {field.name for field in dataclasses.fields(LoraConfig)}
    tables = (COMPUTED, IRRELEVANT.keys(), REFUSED.keys())
    assert keys == set().union(*tables)
    assert sum(map(len, tables)) == len(keys), "each is in one table"


def test_keys_at_the_defaults_of_peft_pass(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig().save_pretrained(tmp_path)
    assert AdapterConfig.read(tmp_path).settings.rank == 8
    for value in (None, False, "", [], {}):
        changed(tmp_path, some_key_of_a_later_peft=value)
        AdapterConfig.read(tmp_path)


_WORDS = ["q_proj", "up_proj", "self_attn.q_proj", "layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj", "proj", "experts"]
_EXPRESSIONS = [r".*q_proj", r"model\.layers\.[01]\..*", r".*\.(up|q)_proj", "q_proj", r".*layers\.1\..*"]
_NAMES = [
    *(
        f"model.layers.{layer}.{end}"
        for layer in (0, 1, 11)
        for end in ("self_attn.q_proj", "mlp.up_proj", "experts.1.up_proj")
    ),
    *("h.0.q_proj", "transformer.h.1.mlp.up_proj", "model.blocks.1.layers.0.q_proj", "q_proj", "mtp.up_proj"),
]


@given(
    targets=st.one_of(st.lists(st.sampled_from(_WORDS), min_size=1), st.sampled_from(_EXPRESSIONS)),
    excluded=st.one_of(st.none(), st.lists(st.sampled_from(_WORDS)), st.sampled_from(_EXPRESSIONS)),
    layers=st.one_of(st.none(), st.integers(0, 1), st.lists(st.sampled_from([0, 1, 11]))),
    lists=st.one_of(st.none(), st.sampled_from(["layers", "h", "blocks"]), st.lists(st.sampled_from(["h", "layers"]))),
    ranks=st.dictionaries(st.sampled_from([*_WORDS, *_EXPRESSIONS]), st.integers(1, 9), max_size=3),
)
@tried(max_examples=200)
def test_names_are_matched_as_peft_matches_them(targets: Any, excluded: Any, layers: Any, lists: Any, ranks: Any) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    layers = None if isinstance(targets, str) else layers
    lists = lists if layers is not None else None
    chosen = {"target_modules": targets, "exclude_modules": excluded, "layers_to_transform": layers, "layers_pattern": lists}
    theirs = LoraConfig(**chosen, rank_pattern=ranks)
    ours = AdapterConfig.of({"r": 4, "lora_alpha": 8, "rank_pattern": ranks, **chosen})
    for name in _NAMES:
        assert ours.targets(name, "lm_head") == bool(check_target_module_exists(theirs, name)), name
        assert ours.rank(name) == ranks.get(get_pattern_key(ranks, name), 4), name


ACTING: dict[str, Any] = {
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "megatron_config": {"a": 1},
    "trainable_token_indices": [3],
    "velora_config": {"num_groups": 8},
    "alora_invocation_tokens": [4, 5],
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 2], [1, 3]],
    "lora_bias": True,
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 0.1},
    "ensure_weight_tying": True,
}


@pytest.mark.parametrize(
    ("key", "value"), [*ACTING.items(), ("bias", "all"), ("key_of_a_later_peft", 1), ("key_of_a_later_peft", True), ("a", 0)]
)
def test_what_is_not_computed_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    from peft import LoraConfig

    assert ACTING.keys() == REFUSED.keys()
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"adapter_config\.json: {key} "):
        AdapterConfig.read(changed(tmp_path, **{key: value}))


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 0},
        {"r": "8"},
        {"lora_alpha": None},
        {"use_rslora": "yes"},
        {"rank_pattern": {"q_proj": 0}},
        {"alpha_pattern": {"(": 2}},
        {"target_modules": "("},
        {"target_modules": 3},
        {"exclude_modules": [1]},
        {"target_modules": "q_proj", "layers_to_transform": [1]},
        {"target_parameters": "experts"},
        {"init_lora_weights": "what"},
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}},
        {"init_lora_weights": "corda"},
        {"init_lora_weights": 1},
        {"peft_type": "IA3"},
    ],
)
def test_impossible_values_are_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        AdapterConfig.read(changed(tmp_path, **settings))


@pytest.mark.parametrize("first", [True, False, "gaussian", "eva", "olora", "pissa", "pissa_niter_4", "orthogonal", "mica"])
def test_first_numbers_after_which_peft_changes_the_model_are_refused(
    first: Any, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Loading such an adapter changes the weights beside it; those that do not are computed."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=first)
    base = stock(model_of("llama"))
    before = base.model.layers[0].self_attn.q_proj.weight.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, config)
    keeps = torch.equal(adapted.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight, before)
    config.save_pretrained(tmp_path)
    if keeps:
        AdapterConfig.read(tmp_path)
    else:
        with pytest.raises(ModelError, match=r"init_lora_weights .* changes the model's weights, too"):
            AdapterConfig.read(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"target_modules": ["v_proj"]}, {"exclude_modules": ["q_proj"]}, {"layers_to_transform": [0]}, {"target_modules": []}],
)
def test_tensors_that_peft_passes_over_are_refused(
    changes: dict[str, Any], model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = written_by_peft(model_of("llama"), tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(ModelError, match=r"adapter_config\.json does not choose model\.layers\.\d\.self_attn\.q_proj"):
        our_logits(model_of("llama"), changed(adapter, **changes))


def test_a_head_that_is_tied_is_refused_in_its_own_words(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = written_by_peft(model_of("llama-tied"), tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    with pytest.raises(ModelError, match="lm_head shares its matrix with the embedding"):
        our_logits(model_of("llama-tied"), adapter)


def test_modules_that_peft_fills_at_random_are_refused(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = written_by_peft(model_of("llama"), tmp_path / "adapter", target_modules=["q_proj"], init_lora_weights=False)
    with pytest.raises(ModelError, match=r"v_proj has no tensors, and init_lora_weights makes some at random"):
        our_logits(model_of("llama"), changed(adapter, target_modules=["q_proj", "v_proj"]))
