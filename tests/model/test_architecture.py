"""What is refused, and that trying finds what is wrong."""

import resource
from typing import Any

import pytest
import torch
from tiny_architectures import CONFIGS, make_config
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headrace.model import Chain, build_skeleton, self_check
from headrace.model.blocks.find_blocks import find_blocks
from headrace.model.blocks.text_part import text_part
from headrace.model.trials.probe import probe
from headrace.model.trials.probe import probe as probe_function
from headrace.model.trials.tiny import shrink_values
from headrace.terms.errors import ModelError
from headrace.terms.options.optimizer import Optimizer


def test_self_check_passes(case: Any) -> None:
    self_check(make_config(case))


def test_encoder_decoder_is_refused() -> None:
    with pytest.raises(ModelError, match="encoder-decoder"):
        Chain.from_config(CONFIG_MAPPING["t5"](), "float32", Optimizer())


HALVES = (
    *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart"),
    *("mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"),
)


@pytest.mark.parametrize("kind", HALVES)
def test_a_decoder_without_its_encoder_is_refused_in_words_that_help(kind: str) -> None:
    config = CONFIG_MAPPING[kind](is_encoder_decoder=False, is_decoder=True)
    with pytest.raises(ModelError, match=r"the decoder of an encoder-decoder model.*cannot be used alone: take a model"):
        self_check(config)


def test_bidirectional_is_refused() -> None:
    with pytest.raises(ModelError, match="causal"):
        Chain.from_config(CONFIG_MAPPING["bert"](), "float32", Optimizer())


def test_no_causal_class_is_refused() -> None:
    with pytest.raises(ModelError, match="no causal language model class"):
        Chain.from_config(CONFIG_MAPPING["vit"](), "float32", Optimizer())


def test_quantised_weights_are_refused() -> None:
    config = make_config(CONFIGS["llama"])
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ModelError, match="gptq"):
        build_skeleton(config, torch.float32)


def test_layer_dropping_is_refused() -> None:
    config = make_config(CONFIGS["opt"])
    config.layerdrop = 0.1
    with pytest.raises(ModelError, match=r"layerdrop 0\.1"):
        build_skeleton(config, torch.float32)


def test_several_lists_of_blocks_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(make_config(CONFIGS["llama"]))
    model.more = nn.ModuleList(list(model.model.layers)[:2])
    with pytest.raises(ModelError, match=r"more.*LlamaDecoderLayer"):
        find_blocks(model)


def test_no_list_of_blocks_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(make_config(CONFIGS["llama"]))
    del model.model.layers
    with pytest.raises(ModelError, match="found none"):
        find_blocks(model)


def test_blocks_are_found(case: Any) -> None:
    config = make_config(case)
    blocks = find_blocks(build_skeleton(config, torch.float32))
    assert len(blocks.modules) == config.num_hidden_layers


def test_self_check_sees_a_block_that_depends_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """State handed from block to block behind the back of the arguments breaks any other order of running."""
    from transformers.models.glm.modeling_glm import GlmDecoderLayer

    original, carried = GlmDecoderLayer.forward, []

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        carried.append(float(hidden_states.detach().mean()))
        return original(self, hidden_states, *args, **kwargs) * (1.0 + 0.1 * (len(carried) % 3))

    monkeypatch.setattr(GlmDecoderLayer, "forward", forward)
    config = CONFIG_MAPPING["glm"](
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=100,
        pad_token_id=0,
    )
    with pytest.raises(ModelError, match="cannot be trained block by block"):
        self_check(config)


def shrink(config: Any) -> Any:
    return shrink_values(type(config), config.to_dict())


def test_shrinking_keeps_structure() -> None:
    small = shrink(CONFIG_MAPPING["gemma3_text"]())
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert small.num_key_value_heads < small.num_attention_heads
    projected = shrink(CONFIG_MAPPING["opt"](hidden_size=1024, word_embed_proj_dim=512))
    assert projected.word_embed_proj_dim < projected.hidden_size
    dense_then_sparse = shrink(CONFIG_MAPPING["deepseek_v3"]())
    assert 0 < dense_then_sparse.first_k_dense_replace < dense_then_sparse.num_hidden_layers


def test_shrinking_shows_every_kind_of_layer() -> None:
    by_index = shrink(CONFIG_MAPPING["bamba"](attn_layer_indices=[9, 18, 27]))
    assert (by_index.attn_layer_indices, by_index.num_hidden_layers) == ([1], 2)
    by_list = shrink(CONFIG_MAPPING["nemotron_h"](layers_block_type=["linear_attention", "mlp"] * 5 + ["full_attention"]))
    assert by_list.layers_block_type == ["linear_attention", "mlp", "full_attention"]
    for small in (by_index, by_list):
        assert 0 < small.num_key_value_heads < small.num_attention_heads


def test_shrunk_heads_of_state_space_layers_share_out_the_expanded_width() -> None:
    small = shrink(CONFIG_MAPPING["mamba2"](hidden_size=1024, expand=4, num_heads=64, head_dim=64))
    assert small.num_heads * small.head_dim == small.expand * small.hidden_size


def test_shrinking_keeps_the_settings_of_single_layers() -> None:
    config = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=12)
    if "per_layer_config" not in config.to_dict():
        pytest.skip("this version of transformers has no settings of single layers")
    config = CONFIG_MAPPING["gemma4_text"](num_hidden_layers=12, per_layer_config={5: {"head_dim": 512}, 11: {"head_dim": 512}})
    settings = shrink(config).to_dict()
    assert len(settings["layer_types"]) == 2
    (own,) = settings["per_layer_config"].values()
    assert own["head_dim"] == 2 * settings["head_dim"]


def test_traits_are_cached() -> None:
    assert probe(make_config(CONFIGS["llama"])) is probe_function(make_config(CONFIGS["llama"]))


def test_a_model_larger_than_memory_needs_none() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chain = Chain.from_config(CONFIG_MAPPING["deepseek_v3"](num_hidden_layers=8), "bfloat16", Optimizer())
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert chain.num_parameters > 50e9
    assert grown_bytes < 500e6


def test_a_table_larger_than_memory_is_never_made() -> None:
    """`nn.Embedding` says which device its weight goes to (None), as `nn.Parameter(torch.empty(...))` does not."""
    config = CONFIG_MAPPING["llama"](vocab_size=1 << 34, hidden_size=1024, num_hidden_layers=1, tie_word_embeddings=True)
    skeleton = build_skeleton(config, torch.bfloat16)
    assert skeleton.get_input_embeddings().weight.numel() == 1 << 44


def test_skeleton_has_real_buffers_and_meta_parameters(case: Any) -> None:
    config = make_config(case)
    skeleton = build_skeleton(config, torch.bfloat16)
    assert all(p.device.type == "meta" and not p.requires_grad for p in skeleton.parameters())
    stock = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_buffers())
    ours = dict(skeleton.named_buffers())
    assert set(ours) == set(stock)
    for name, buffer in ours.items():
        assert torch.equal(buffer.float(), stock[name].float()), name
    assert skeleton.training


@pytest.mark.wide
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("zamba2", r"shared_transformer.* are one parameter. Its blocks share some", marks=pytest.mark.deep),
        ("zamba", r"shared_transf.* are one parameter. Its blocks share some"),
        ("gemma3n_text", r"For \(1, 13\) tokens its blocks get hidden states of \(4, 1, 13, 64\)"),
        ("gemma4_text", r"gradient of .* differs .*; its blocks get per_layer_input, \(1, 13, 8\), besides hidden states"),
        ("inkling2_text", r"its blocks get block_states, .*, besides hidden states, whose gradient is not computed"),
    ],
)
def test_what_stands_in_the_way_of_running_block_by_block_is_named(kind: str, words: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    with pytest.raises(ModelError, match=words):
        self_check(CONFIG_MAPPING[kind]())


def test_heads_that_a_part_of_a_configuration_has_of_its_own_are_shrunk_together() -> None:
    """DBRX as it is published: the heads of keys and values stand under attn_config."""
    attention = {"kv_n_heads": 8, "rope_theta": 5e5, "clip_qkv": 8}
    experts = {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}
    self_check(CONFIG_MAPPING["dbrx"](d_model=6144, n_heads=48, n_layers=40, attn_config=attention, ffn_config=experts))


def test_several_parts_with_text_are_refused_in_words() -> None:
    """MusicGen has an encoder of text and a decoder of tokens that are sound."""
    config = CONFIG_MAPPING["musicgen"]()
    with pytest.raises(ModelError, match="encoder-decoder"):
        self_check(config)
    config.is_encoder_decoder = False
    for look in (self_check, text_part):
        with pytest.raises(ModelError, match=r"MusicgenConfig describes .* several parts with text.*'decoder'"):
            look(config)


@pytest.mark.parametrize("kind", ["reformer", "cohere_compass_text"])
def test_what_transformers_cannot_build_is_told_so_whichever_attention_it_has(kind: str) -> None:
    """Reformer has no fused attention, and asks to be a decoder; the other lacks a kind of layer that its own code asks for."""
    if kind not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    with pytest.raises(ModelError, match=r"transformers cannot build the model: .*Error"):
        self_check(CONFIG_MAPPING[kind]())
