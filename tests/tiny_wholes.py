"""Tiny models of several parts, by the name of their configuration: what has pictures or sound beside its text."""

from typing import Any

import torch
from tiny_sizes import SIZES
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, VoxtralForConditionalGeneration

_TEXT = {**SIZES, "pad_token_id": 0, "eos_token_id": 1}
_HEAD = {**_TEXT, "head_dim": 16}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_MIXED = {**_HEAD, **_LINEAR, "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
_WITHOUT_OWN_INPUTS = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 8}

# Name -> options of the configuration; what is put together of them is as transformers has it.
WHOLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {
            "text_config": {**_HEAD, "model_type": "gemma3_text", "sliding_window": 8},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "text_config": {**_HEAD, **_WITHOUT_OWN_INPUTS, "model_type": "gemma4_text"},
            "vision_config": {**_VISION, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
        },
    ),
    "gemma4-experts": (
        "gemma4",
        {
            "text_config": {
                **_HEAD,
                **_WITHOUT_OWN_INPUTS,
                **_EXPERTS,
                "model_type": "gemma4_text",
                "enable_moe_block": True,
                "top_k_experts": 2,
            },
            "vision_config": {**_VISION, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {**_HEAD, "model_type": "mistral"},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "mistral3-tied": (
        "mistral3",
        {
            "text_config": {**_HEAD, "model_type": "mistral", "tie_word_embeddings": False},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": True,
        },
    ),
    "mistral3-untied": (
        "mistral3",
        {
            "text_config": {**_HEAD, "model_type": "mistral", "tie_word_embeddings": True},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": {
                **_HEAD,
                "model_type": "llama4_text",
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "attention_chunk_size": 32,
            },
            "vision_config": {
                **_VISION,
                "model_type": "llama4_vision_model",
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "intermediate_size": 128,
            },
        },
    ),
    "qwen3_5": (
        "qwen3_5",
        {
            "text_config": {**_MIXED, "model_type": "qwen3_5_text"},
            "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5"},
        },
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": {
                **{name: value for name, value in _MIXED.items() if name != "intermediate_size"},
                **_EXPERTS,
                "model_type": "qwen3_5_moe_text",
                "num_experts_per_tok": 2,
                "shared_expert_intermediate_size": 24,
            },
            "vision_config": {**_QWEN_VISION, "model_type": "qwen3_5_moe"},
        },
    ),
    "llava": (
        "llava",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        },
    ),
    "llava-experts": (
        "llava",
        {
            "text_config": {**_HEAD, **_EXPERTS, "model_type": "qwen3_moe", "num_experts_per_tok": 2},
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        },
    ),
    # Weights of the text model that transformers does more with on loading than placing them.
    "llava-converted": (
        "llava",
        {
            "text_config": {**_MIXED, "model_type": "olmo_hybrid", "num_key_value_heads": 4, "linear_num_key_heads": 4},
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 32},
        },
    ),
    "voxtral": (
        "voxtral",
        {
            "text_config": {**_HEAD, "model_type": "llama"},
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 16,
            },
        },
    ),
}
# The text part has no class of its own in transformers.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {**_TEXT, "model_type": "qwen2_5_vl_text"},
            "vision_config": {**_QWEN_VISION, "model_type": "qwen2_5_vl"},
        },
    ),
}
# The whole model does not scale its logits as the text model does.
DIFFERING: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2_vision": (
        "cohere2_vision",
        {
            "text_config": {**_TEXT, "model_type": "cohere2", "sliding_window": 8},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        },
    ),
}
# The whole model's code asks for pictures.
WITH_PICTURES_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "blip-2": (
        "blip-2",
        {
            "text_config": {
                "model_type": "opt",
                "vocab_size": 160,
                "hidden_size": 32,
                "ffn_dim": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "word_embed_proj_dim": 32,
                "dropout": 0.0,
            },
            "vision_config": _VISION,
            "qformer_config": {
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "encoder_hidden_size": 32,
                "vocab_size": 160,
            },
        },
    ),
}


def make_whole(name: str, **of_text: Any) -> Any:
    """Return a model with weights that are nowhere near their initial values; `of_text` are changes to its text model."""
    kind, options = {**WHOLES, **REFUSED, **DIFFERING, **WITH_PICTURES_ONLY}[name]
    config = CONFIG_MAPPING[kind](**{**options, "text_config": {**options["text_config"], **of_text}})
    torch.manual_seed(0)
    if kind == "voxtral":
        model = VoxtralForConditionalGeneration(config)
    else:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + (parameter.dim() == 1))
    return model.eval()
