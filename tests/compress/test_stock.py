"""What is written loads in stock transformers with compressed-tensors, as it decodes here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressing import SIZES, run, write_model
from test_compression import decoded
from tiers import sampled
from tiny_architectures import CONFIGS
from transformers import AutoModelForCausalLM

from headrace.compress.decompression import decompress_model
from headrace.model.stored.safetensors_file import read_header
from headrace.terms.errors import ModelError


def logits_of(directory: Path) -> torch.Tensor:
    """Logits of stock transformers in bfloat16, a loop over experts where it has one."""
    loop = {"experts_implementation": "eager"}
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **loop)
    except ValueError:  # it has no experts
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.randint(2, 150, (2, 9), generator=torch.Generator().manual_seed(0))).logits
    return logits


_STATES = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
_TWO = {"num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LINEAR = {f"linear_{name}": size for name, size in (("num_key_heads", 2), ("num_value_heads", 2), ("key_head_dim", 16))}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Beside the architectures that all tests share: whose code reads weights as it is loaded, and further mixtures.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {**_STATES, "time_step_rank": 32}),
    "falcon-mamba": ("falcon_mamba", {**_STATES, "time_step_rank": 32}),
    "falcon-mamba-uneven": ("falcon_mamba", {**_STATES, "hidden_size": 64, "intermediate_size": 160, "time_step_rank": 32}),
    "recurrent-gemma": ("recurrent_gemma", {**SIZES, "hidden_size": 32, "lru_width": 32, "attention_window_size": 8}),
    "glm4-moe": ("glm4_moe", {**SIZES, **_ROUTED, "hidden_size": 32, "head_dim": 16, "n_routed_experts": 4}),
    "qwen2-moe": ("qwen2_moe", {**SIZES, **_ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 32}),
    # Their convolutions are stored one by one, and joined as they are read.
    "olmo-hybrid": ("olmo_hybrid", {**SIZES, **_LINEAR, "layer_types": ["linear_attention", "full_attention"], **_TWO}),
    "kimi-linear": (
        "kimi_linear",
        {**SIZES, **_ROUTED, **_TWO, "num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 2, "kv_lora_rank": 16}
        | {
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
# Its matrices lie the other way, which int4 does not code.
ARCHITECTURES = {name: case for name, case in (CONFIGS | MORE).items() if case[0] not in ("gpt2", "llama4_text")}


@pytest.mark.parametrize("name", sampled(ARCHITECTURES, ["falcon-mamba-uneven", "qwen3-moe", "olmo-hybrid"]))
def test_each_architecture_is_loaded_as_it_is_decompressed(name: str, tmp_path: Path) -> None:
    """Widths of 24 and 48 are not coded: experts of them stay in 16 bits beside coded matrices."""
    kind, values = ARCHITECTURES[name]
    model = write_model(tmp_path / "model", kind, **{"hidden_size": 32, **values, "vocab_size": 320})
    run(model, tmp_path / "run", group_size=64 if "uneven" in name else 32)
    decompress_model(tmp_path / "run" / "out", tmp_path / "decompressed")
    assert torch.equal(logits_of(tmp_path / "run" / "out"), logits_of(tmp_path / "decompressed"))


def test_experts_in_16_bits_keep_their_numbers_as_one_stack(tmp_path: Path) -> None:
    kind, values = CONFIGS["qwen3-moe"]
    model = write_model(tmp_path / "model", kind, **{"hidden_size": 32, **values, "vocab_size": 320})
    run(model, tmp_path / "run", group_size=32)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "out", dtype=torch.bfloat16).state_dict()
    stored = {key for file in (tmp_path / "run" / "out").glob("*.safetensors") for key in read_header(file)}
    for layer in range(3):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            assert key in stored
            assert torch.equal(before[key], after[key])
    assert not any(".experts.0." in key for key in stored)


def test_a_model_whose_experts_stock_replaces_is_refused(tmp_path: Path) -> None:
    more = {"num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 96, "attention_chunk_size": 8}
    model = write_model(tmp_path / "model", "llama4_text", **more)
    with pytest.raises(ModelError, match=r"its experts .Llama4TextExperts. lie in one stack that int4 does not code"):
        run(model, tmp_path / "run")
    assert not (tmp_path / "run" / "out").exists()


@pytest.mark.parametrize("kind", sampled(["llama", "mixtral", "qwen3_moe", "uneven"]))
def test_logits_are_equal(kind: str, tmp_path: Path) -> None:
    # "uneven": widths that take groups of different sizes.
    sizes: dict[str, Any] = {"uneven": {"intermediate_size": 160}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2}}
    more = {"moe_intermediate_size": 96, "head_dim": 16} if kind == "qwen3_moe" else {}
    model = write_model(tmp_path / "model", "llama" if kind == "uneven" else kind, **sizes.get(kind, {}), **more)
    run(model, tmp_path, group_size=64)
    weights = decoded(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, experts_implementation="eager").eval()
    folder = tmp_path / "decoded"
    folder.mkdir()
    from safetensors.torch import save_file

    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    plain.config.save_pretrained(folder)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, experts_implementation="eager").eval()
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, experts_implementation="eager").eval()
    ids = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, stock(ids).logits)
        assert not torch.equal(plain(ids).logits, stock(ids).logits)
