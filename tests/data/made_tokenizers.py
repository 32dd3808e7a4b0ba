"""Byte-level tokenizers made on the spot, with and without a chat template, and token sets made of bare numbers."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.data import TokenSet, write_tokens

PLAIN = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Renders the last assistant turn unlike earlier ones, as Qwen3 does.
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# Puts how many messages there are in front, so no rendering begins like a longer one.
COUNTING = "{{ messages | length }} messages\n{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
# Insists on an order of roles.
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"
)

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "water is led to the turbine by the headrace",
    "what is two and two? two and two is four.",
    "user assistant system think",
)


@cache
def _backend() -> str:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|eos|>", "<|pad|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 10, trainer)
    return backend.to_str()


def make_tokenizer(template: str | None = None, *, eos: bool = True) -> PreTrainedTokenizerFast:
    marks = {"eos_token": "<|eos|>", "pad_token": "<|pad|>"} if eos else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(_backend()), additional_special_tokens=["<|start|>", "<|end|>"], **marks
    )
    tokenizer.chat_template = template
    return tokenizer


def make_tokens(directory: Path, samples: Sequence[tuple[Sequence[int], Sequence[bool]]], sequence_length: int) -> TokenSet:
    rows = ((list(ids), list(trained), "input_ids") for ids, trained in samples)
    write_tokens(directory, rows, sequence_length=sequence_length, pad_id=0)
    return TokenSet.open(directory)


def numbered_tokens(directory: Path, lengths: Sequence[int], sequence_length: int) -> TokenSet:
    """Samples of the given lengths in which no token id occurs twice in the whole set, all trained."""
    samples, first = [], 1
    for length in lengths:
        samples.append((range(first, first + length), [True] * length))
        first += length
    return make_tokens(directory, samples, sequence_length)
