"""Tiny configurations of the architectures under test, and the plain models they describe."""

from typing import Any

import torch
from tiny_sizes import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headrace.model import Chain, MicroBatch

_HEAD = {**SIZES, "head_dim": 16}
_NO_GROUPS = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
_GPT2 = {"vocab_size": 160, "n_embd": 32, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1}
_GPT2_PLAIN = {**_GPT2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
_OPT = {**_NO_GROUPS, "ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}
_OPT.pop("intermediate_size")
_MIXTRAL = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN3_MOE = {**_HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
_DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "short_factor": [1.0] * 4,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
_MAMBA = {"num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 160, "state_size": 8}
_STATE_SPACE = {"num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 160, "chunk_size": 8, "n_groups": 2}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama-tied": ("llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", _HEAD),
    "gemma2": ("gemma2", {**_HEAD, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {**_HEAD, "sliding_window": 8, "num_hidden_layers": 6}),
    "phi3": ("phi3", {**SIZES, "pad_token_id": 0}),
    "mistral": ("mistral", {**SIZES, "sliding_window": 8}),
    "gpt2": ("gpt2", _GPT2_PLAIN),
    "opt": ("opt", _OPT),
    "opt-projected": ("opt", {**_OPT, "word_embed_proj_dim": 16}),
    "gpt-neox": ("gpt_neox", _NO_GROUPS),
    "bloom": ("bloom", {"vocab_size": 160, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": ("falcon", {"vocab_size": 160, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}),
    "granite": ("granite", {**SIZES, "logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "mixtral": ("mixtral", _MIXTRAL),
    "mixtral-routed": ("mixtral", {**_MIXTRAL, **_ROUTED}),
    "qwen3-moe": ("qwen3_moe", _QWEN3_MOE),
    "qwen3-moe-routed": ("qwen3_moe", {**_QWEN3_MOE, **_ROUTED, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, **_ROUTED}),
    "deepseek-v3": ("deepseek_v3", _DEEPSEEK),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 128,
            "vocab_size": 160,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "gpt-oss": ("gpt_oss", {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "mamba2": ("mamba2", {**_STATE_SPACE, "num_heads": 4, "head_dim": 16, "state_size": 8}),
    "bamba": (
        "bamba",
        {
            **SIZES,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        {
            **_MIXTRAL,
            "shared_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            **_HEAD,
            **_STATE_SPACE,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "mamba": ("mamba", _MAMBA),
    "falcon-mamba": ("falcon_mamba", _MAMBA),
    "jamba": (
        "jamba",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "recurrent-gemma": ("recurrent_gemma", {**SIZES, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 8}),
    "lfm2": ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "qwen3-next": (
        "qwen3_next",
        {
            **_HEAD,
            **_EXPERTS,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "minimax": ("minimax", {**_MIXTRAL, "head_dim": 16, "block_size": 8}),
    "longrope": (
        "phi3",
        {**SIZES, "pad_token_id": 0, "original_max_position_embeddings": 64, "rope_parameters": _LONG_ROPE},
    ),
    "dynamic-rope": (
        "llama",
        {
            **SIZES,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **_HEAD,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 8,
        },
    ),
    "qwen2-moe": ("qwen2_moe", {**SIZES, **_EXPERTS}),
    "deepseek-v2": ("deepseek_v2", {**_DEEPSEEK, "n_shared_experts": 1, "topk_method": "greedy", "head_dim": 8}),
    "dots1": (
        "dots1",
        {
            **_HEAD,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "cohere-qk-norm": ("cohere", {**SIZES, "use_qk_norm": True}),
}
DROPOUT_GPT2 = ("gpt2", _GPT2)


def make_config(case: tuple[str, dict[str, Any]]) -> Any:
    config = CONFIG_MAPPING[case[0]](**case[1])
    config.use_cache = False
    return config


def make_plain(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A stock model with weights far from their initial values, in which mistakes would hide."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    for parameter in model.parameters():  # not the buffers: rotary tables stay float32 in a stock bfloat16 model
        parameter.data = parameter.data.to(dtype)
    return model.train()


def make_batches(padded: bool, seed: int = 3) -> list[MicroBatch]:
    """Micro-batches of unequal size and length, with untrained positions and, if wanted, padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rows, length in ((2, 17), (1, 12), (3, 14)):
        ids = torch.randint(2, 160, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, :3] = -100
        mask = None
        if padded:
            mask = torch.ones_like(ids)
            mask[-1, length - 4 :] = 0
            labels[mask == 0] = -100
        batches.append(MicroBatch(ids, labels, mask))
    return batches


def flats_of(chain: Chain, plain: Any) -> list[torch.Tensor]:
    """The weights of `plain` in the chain's flat layouts."""
    state = dict(plain.named_parameters())
    flats = []
    for layout in chain.layouts:
        flat = torch.zeros(layout.num_elements, dtype=chain.dtype)
        for spec in layout.parameters:
            flat[spec.offset : spec.offset + spec.num_elements] = state[spec.name].detach().flatten()
        flats.append(flat)
    return flats
