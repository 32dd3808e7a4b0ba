"""Byte-level tokenizers made on the spot, with and without a chat template, and token sets made of bare numbers."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headrace.data import TokenSet, write_tokens
from headrace.data.values.values import Encoded

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
def byte_backend() -> str:
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
    return _with_marks(Backend.from_str(byte_backend()), template, eos=eos)


def _with_marks(backend: Backend, template: str | None, *, eos: bool = True) -> PreTrainedTokenizerFast:
    marks = {"eos_token": "<|eos|>", "pad_token": "<|pad|>"} if eos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<|start|>", "<|end|>"], **marks)
    tokenizer.chat_template = template
    return tokenizer


def merging_tokenizer(template: str | None = None, *, trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """In which white space merges, as in most vocabularies; `trim_offsets`: tokens do not count blanks at their ends."""
    values = json.loads(byte_backend())
    for merged in ("ĊĊ", "ĠĠ"):
        values["model"]["vocab"][merged] = max(values["model"]["vocab"].values()) + 1
        values["model"]["merges"].append([merged[0], merged[1]])
    backend = Backend.from_str(json.dumps(values))
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return _with_marks(backend, template)


def slow_tokenizer(
    template: str | None = None, make: Callable[[str | None], PreTrainedTokenizerFast] = make_tokenizer
) -> PreTrainedTokenizerFast:
    """As those written in Python are: it cannot tell which characters a token stands for."""

    class Slow(PreTrainedTokenizerFast):
        is_fast = False

        def __call__(self, *arguments, **options):
            assert not options.get("return_offsets_mapping")
            return super().__call__(*arguments, **options)

    tokenizer = make(template)
    tokenizer.__class__ = Slow
    return tokenizer


def make_tokens(directory: Path, samples: Sequence[tuple[Sequence[int], Sequence[bool]]], sequence_length: int) -> TokenSet:
    rows = ((Encoded(list(ids), list(trained)), "input_ids") for ids, trained in samples)
    write_tokens(directory, rows, sequence_length=sequence_length, pad_id=0)
    return TokenSet.open(directory)


def numbered_tokens(directory: Path, lengths: Sequence[int], sequence_length: int) -> TokenSet:
    """Samples of the given lengths in which no token id occurs twice in the whole set, all trained."""
    samples, first = [], 1
    for length in lengths:
        samples.append((range(first, first + length), [True] * length))
        first += length
    return make_tokens(directory, samples, sequence_length)
