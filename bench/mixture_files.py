"""A random mixture of experts (Qwen3-MoE's architecture) as safetensors and, with the same weights, as a GGUF file.

The package writes no mixtures to GGUF (`headrace/apps/gguf/gguf_writing.py`), so that this file is for llama.cpp alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Of the mixture."""

    hidden: int = 512
    width: int = 512
    blocks: int = 8
    experts: int = 64
    choices: int = 4

    @property
    def all_experts(self) -> int:
        """Experts of all blocks."""
        return self.blocks * self.experts


def make_model(directory: Path, sizes: Sizes) -> None:
    """Write the mixture to `directory`, with a tokenizer and with `model.gguf`, the same weights for llama.cpp."""
    import torch
    from experts import write_tokenizer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.width,
        moe_intermediate_size=sizes.width,
        num_hidden_layers=sizes.blocks,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.choices,
        norm_topk_prob=True,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes.hidden // 8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    write_gguf(model, directory, sizes)


def write_gguf(model: Any, directory: Path, sizes: Sizes) -> None:
    """Write `model`, a Qwen3-MoE, to `model.gguf`: matrices in bfloat16, norms and routers in float32."""
    import gguf
    import torch

    from headrace.apps.gguf.gguf_words import WordsOf

    config, writer = model.config, gguf.GGUFWriter(directory / "model.gguf", "qwen3moe")
    writer.add_block_count(sizes.blocks)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden)
    writer.add_feed_forward_length(sizes.width)
    writer.add_expert_feed_forward_length(sizes.width)
    writer.add_expert_count(sizes.experts)
    writer.add_expert_used_count(sizes.choices)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    WordsOf(directory, config.vocab_size).add_to(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, sizes.blocks)

    def add(name: str, tensor: Any) -> None:
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, name
        if tensor.dim() == 1 or known.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(known, tensor.float().numpy())
        else:
            bits = tensor.contiguous().view(torch.uint16).numpy().view("uint8")
            writer.add_tensor(known, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)

    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            for part, piece in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                add(f"{stem}{part}.weight", piece)
        else:
            add(name if name.endswith(".weight") else f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
