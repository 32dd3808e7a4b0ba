"""What we write of adapters is what stock peft reads: the same logits, for mixtures with all kinds of dense parts, too."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain
from tiny_sizes import SIZES
from transformers import AutoModelForCausalLM

from headrace.model import Chain, Checkpoint
from headrace.model.adapters.adapter_files import write_adapters
from headrace.model.adapters.adapter_reading import read_adapters
from headrace.model.adapters.adapters import Adapters
from headrace.terms.errors import ConfigError
from headrace.terms.layout import part
from headrace.terms.options.adapter import adapter_of
from headrace.terms.options.optimizer import Optimizer

IDS = torch.randint(2, 160, (2, 12), generator=torch.Generator().manual_seed(4))
_HEAD = {**SIZES, "head_dim": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
_NUMBERED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DENSE_FIRST = {"first_k_dense_replace": 1}
_NO_GROUPS = {"n_group": 1, "topk_group": 1}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": (
        "deepseek_v2",
        {**SIZES, **_LATENT, **_ROUTED, **_DENSE_FIRST, "head_dim": 8, "num_key_value_heads": 4, "topk_method": "greedy"},
    ),
    "glm4-moe": ("glm4_moe", {**_HEAD, **_ROUTED, **_DENSE_FIRST}),
    "dots1": ("dots1", {**_HEAD, **_ROUTED, **_DENSE_FIRST, **_NO_GROUPS}),
    "longcat": (
        "longcat_flash",
        {
            **{key: SIZES[key] for key in ("vocab_size", "hidden_size", "num_attention_heads")},
            **_LATENT,
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    "qwen2-moe": ("qwen2_moe", {**SIZES, **_NUMBERED, "shared_expert_intermediate_size": 32}),
    "qwen3-next": (
        "qwen3_next",
        {
            **_HEAD,
            **_NUMBERED,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "ernie4-5-moe": (
        "ernie4_5_moe",
        {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1},
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", {**_HEAD, "num_experts": 4, "moe_topk": 2}),
    "exaone-moe": ("exaone_moe", {**_HEAD, **_NUMBERED, **_DENSE_FIRST, "num_shared_experts": 1}),
    "afmoe": ("afmoe", {**_HEAD, **_NUMBERED, **_NO_GROUPS, "num_shared_experts": 1, "num_dense_layers": 1}),
    "solar-open": ("solar_open", {**_HEAD, **_ROUTED, **_NO_GROUPS}),
    # transformers' rules for its weights take today's names for older ones, too, and would rename what has them.
    "laguna": (
        "laguna",
        {**_HEAD, **_NUMBERED, "shared_expert_intermediate_size": 32, "num_attention_heads_per_layer": [4, 4, 4]},
    ),
}
CASES = CONFIGS | MIXTURES
_NOT_ADAPTED = "falcon"  # its linear modules have code of their own
NAMES = [name for name in CASES if name != _NOT_ADAPTED]


class Written:
    """Adapters of random numbers beside a tiny model, in files."""

    def __init__(self, name: str, adapter: str, folder: Path) -> None:
        self.path, self.adapter = folder / "model", folder / "adapter"
        make_plain(make_config(CASES[name])).eval().save_pretrained(self.path)
        checkpoint = Checkpoint.open(self.path)
        self.chain = Chain.from_config(checkpoint.config, "float32", Optimizer())
        self.weights = self.chain.attach(checkpoint)
        args = self.chain.model, self.chain.layouts, self.chain.num_blocks, adapter_of(adapter), 0, self.chain.stored_type
        self.adapters = Adapters.of(*args)
        generator = torch.Generator().manual_seed(1)
        self.flats = {
            unit: torch.randn(layout.num_elements, generator=generator) * 0.1 + ("dora" in adapter)
            for unit, layout in self.adapters.layouts.items()
        }
        write_adapters(self.adapter, self.adapters, self.chain, self.weights, self.flats.__getitem__, {})

    def base(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()

    def ours(self, adapters: Adapters, flats: Any) -> torch.Tensor:
        for unit, layout in adapters.layouts.items():
            adapters.bind(unit, layout, flats[unit], None)
        model = self.base()
        adapters.install(model)
        with torch.no_grad():
            return model(IDS).logits

    def peft(self) -> torch.Tensor:
        from peft import PeftModel

        with warnings.catch_warnings(), torch.no_grad():
            warnings.filterwarnings("error", message=".*(missing|unexpected).*keys.*")
            return PeftModel.from_pretrained(self.base(), self.adapter).eval()(IDS).logits

    def check(self) -> None:
        """Stock peft gives our logits, and we read back what we wrote."""
        ours = self.ours(self.adapters, self.flats)
        with torch.no_grad():
            assert (ours - self.base()(IDS).logits).abs().max() > 1e-2, "the adapters do something"
        torch.testing.assert_close(self.peft(), ours, rtol=1e-4, atol=1e-5)
        again = read_adapters(self.adapter, self.chain, self.weights)
        torch.testing.assert_close(self.ours(again.adapters, again.flats), ours, rtol=0, atol=0)


def settings_for(name: str, adapter: str) -> str:
    """Leave out what peft loads in no form, as the note says."""
    return adapter + (",exclude_modules=out_proj" if name in ("mamba", "falcon-mamba", "mamba2", "nemotron-h") else "")


@pytest.mark.parametrize(
    "name", sampled(NAMES, ["llama", "deepseek-v2", "glm4-moe", "dots1", "longcat", "qwen2-moe", "laguna"])
)
def test_peft_reads_adapters_of_all_linear_modules(name: str, tmp_path: Path) -> None:
    written = Written(name, settings_for(name, "lora:rank=4"), tmp_path)
    assert not any("peft" in note for note in written.adapters.notes)
    written.check()


WITH_EXPERTS = [
    name for name in (*CONFIGS, *MIXTURES) if any(word in name for word in ("moe", "mix", "deep", "dots", "gpt-oss"))
]


@pytest.mark.parametrize("name", sampled(WITH_EXPERTS, ["deepseek-v2", "mixtral"]))
def test_peft_reads_adapters_of_experts_beside_them(name: str, tmp_path: Path) -> None:
    Written(name, settings_for(name, "lora:rank=4,target_modules=all-linear+experts"), tmp_path).check()


@pytest.mark.parametrize(
    ("name", "adapter"),
    sampled(
        [
            ("llama", "lora:rank=4,exclude_modules=k_proj+layers.1.mlp.up_proj"),
            ("llama", "lora:rank=4,target_modules=q_proj+up_proj,exclude_modules=layers.0.self_attn.q_proj"),
            ("glm4-moe", "lora:rank=4,exclude_modules=layers.0.mlp.gate_proj,dropout=0.1"),
            ("qwen2-moe", "dora:rank=4"),
            ("mixtral", "dora:rank=4"),
        ]
    ),
)
def test_peft_reads_what_is_chosen(name: str, adapter: str, tmp_path: Path) -> None:
    written = Written(name, adapter, tmp_path)
    written.check()
    excluded = adapter_of(adapter).excluded
    config = json.loads((written.adapter / "adapter_config.json").read_text())
    assert config["exclude_modules"] == (list(excluded) or None)
    names = [each.name for found in written.adapters.products.values() for each in found]
    assert not any(f".{each}".endswith(f".{word}") for each in names for word in excluded)


@pytest.mark.parametrize(
    ("name", "adapter", "words"),
    sampled(
        [
            ("deepseek-v2", "dora:rank=4", "down_proj, gate_proj, up_proj in deepseek_v2: train lora, or"),
            ("mamba2", "lora:rank=4", "out_proj in mamba2: give exclude_modules=out_proj"),
        ]
    ),
)
def test_what_peft_loads_in_no_form_is_said(name: str, adapter: str, words: str, tmp_path: Path) -> None:
    """And we read it ourselves."""
    written = Written(name, adapter, tmp_path)
    assert any(f"peft does not load {adapter[:4]} of {words}" in note for note in written.adapters.notes)
    assert words in (written.adapter / "README.md").read_text()
    with pytest.raises(ValueError, match=r"PEFT|lora"):
        written.peft()
    again = read_adapters(written.adapter, written.chain, written.weights)
    assert again.flats.keys() == written.flats.keys()
    for unit, layout in written.adapters.layouts.items():
        for spec in layout.parameters:
            assert torch.equal(part(again.flats[unit], spec), part(written.flats[unit], spec)), spec.name


@pytest.mark.parametrize("name", sampled(["qwen2-moe", "qwen3-next"]))
def test_modules_smaller_than_the_rank_are_left_out_with_a_note(name: str, tmp_path: Path) -> None:
    written = Written(name, "lora", tmp_path)
    assert any(
        "modules are smaller than rank 16" in note and "shared_expert_gate (1 x 32)" in note for note in written.adapters.notes
    )
    assert not any(
        "shared_expert_gate" in key for layout in written.adapters.layouts.values() for key in str(layout.parameters).split()
    )
    with pytest.raises(ConfigError, match=r"rank 16 is more than .*shared_expert_gate has: it is 1 x 32"):
        Written(name, "lora:target_modules=q_proj+shared_expert_gate", tmp_path / "named")
