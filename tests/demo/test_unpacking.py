"""Weights that were written as GGUF come back as the model that they were."""

from pathlib import Path

import numpy
import pytest
import real_model
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

gguf = pytest.importorskip("gguf", reason="gguf is not installed (extra `demo`)")
HEADS, GROUPS = 4, 2
# Bytes as byte-level BPE writes them: those that are printable stand for themselves.
ALPHABET = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ"]
TOKENS = ["<|end|>", "<|start|>", *ALPHABET, "12", "ab"]


def in_pairs(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Return rows in GGUF's order: of each head, row i beside row i + half."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return numpy.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(weight.shape)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).float()
        return model


@pytest.fixture(scope="module")
def unpacked(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    config = model.config
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in TOKENS])
    writer.add_token_merges(["1 2", "a b"])
    for add in (writer.add_eos_token_id, writer.add_unk_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = in_pairs(values, HEADS if "q_proj" in name else GROUPS)
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    out = folder / "out"
    out.mkdir()
    real_model.unpack(folder / "tiny.gguf", out)
    return out


def gguf_name(name: str) -> str:
    known = {llama: of_gguf for of_gguf, llama in {**real_model.IN_BLOCK, **real_model.OUTSIDE}.items()}
    if not name.startswith("model.layers."):
        return f"{known[name.removesuffix('.weight')]}.weight"
    number, _, part = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    return f"blk.{number}.{known[part]}.weight"


def test_the_weights_are_those_that_were_packed(unpacked: Path, model: LlamaForCausalLM) -> None:
    loaded, told = AutoModelForCausalLM.from_pretrained(unpacked, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_the_tokenizer_takes_digits_one_by_one_and_has_the_chat_template(unpacked: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(unpacked)
    assert tokenizer.tokenize("ab 12<|end|>") == ["ab", "Ġ", "1", "2", "<|end|>"]
    assert tokenizer.decode(tokenizer("ab 12!").input_ids) == "ab 12!"
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == ("<|end|>", "<|start|>", "<|end|>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
