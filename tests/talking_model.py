"""A tiny Llama that talks: a byte-level tokenizer, a chat template, random weights."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def save_talking_model(directory: Path, positions: int = 64, hidden: int = 32, blocks: int = 2) -> Path:
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": blocks, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=320, max_position_embeddings=positions, eos_token_id=0, bos_token_id=None, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    made.save_pretrained(directory, max_shard_size="30KB" if hidden == 32 else "1GB")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=260, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["water"], trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    whole.chat_template = TEMPLATE
    whole.save_pretrained(str(directory))
    return directory
