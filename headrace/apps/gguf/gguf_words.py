"""The tokenizer of a model directory, as a GGUF file says it: tokens with kinds, merges, special tokens, chat template.

A file names how text is cut into words before merges (`tokenizer.ggml.pre`): llama.cpp knows such names, no expressions. Only
tokenizers whose cutting has a name here can be written. Invariant: others are refused, before anything is written.
"""

import json
from pathlib import Path
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Names of llama.cpp by what cuts: the expression of a split, "digits" where each stands alone, "bytes" for GPT-2's own rule.
_CUTS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (_CONTRACTIONS % r"\p{N}{1,3}",): "llama-bpe",
    (_CONTRACTIONS % r"\p{N}",): "qwen2",
}
_TELL_ENDS = ("generation_config.json", "config.json")
_NORMAL, _UNKNOWN, _CONTROL, _OWN, _UNUSED, _BYTE = range(1, 7)  # gguf.TokenType


class WordsOf:
    """What a GGUF file says of the tokenizer in `directory`, for a model with `count` rows in its embedding.

    Raises:
        ValueError: llama.cpp has no such tokenizer; its text is a reason.
    """

    def __init__(self, directory: Path, count: int) -> None:
        try:
            found = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"tokenizer.json cannot be read ({error.strerror})") from error
        model = found["model"]
        if model.get("type") != "BPE":
            raise ValueError(f"its tokenizer is of type {model.get('type')}, not BPE")
        self._directory, self._count, self._model = directory, count, model
        self._added = {each["id"]: each for each in found.get("added_tokens", ())}
        self.cut = "default" if model.get("byte_fallback") else _name_of(found.get("pre_tokenizer"))

    def add_to(self, writer: Any) -> None:
        """Add them to a `gguf.GGUFWriter`."""
        from gguf import SpecialVocab

        pieces = self._model.get("byte_fallback")
        known = {number: token for token, number in self._model["vocab"].items()}
        known |= {number: each["content"] for number, each in self._added.items()}
        writer.add_tokenizer_model("llama" if pieces else "gpt2")
        writer.add_tokenizer_pre(self.cut)
        writer.add_token_list([known.get(number, f"[PAD{number}]") for number in range(self._count)])
        writer.add_token_types([self._kind(number, known.get(number)) for number in range(self._count)])
        if pieces:  # earlier merges go first
            writer.add_token_scores([-float(number) for number in range(self._count)])
        special = SpecialVocab(self._directory, load_merges=not pieces, n_vocab=self._count)
        special.add_to_gguf(writer, quiet=True)
        self._add_ends(writer, special.special_token_ids.get("eos"))

    def _add_ends(self, writer: Any, own: int | None) -> None:
        """Add the tokens that end answers besides the tokenizer's `own`: of the last two readers know, of others Headrace."""
        told = (
            json.loads(path.read_text(encoding="utf-8")) for path in map(self._directory.joinpath, _TELL_ENDS) if path.exists()
        )
        found: Any = next((ends for each in told if (ends := each.get("eos_token_id")) is not None), [])
        ends = [end for end in (found if isinstance(found, list) else [found]) if end != own]
        for end, add in zip(reversed(ends), (writer.add_eot_token_id, writer.add_eom_token_id), strict=False):
            add(end)
        if len(ends) > 2:
            writer.add_array("tokenizer.ggml.eos_token_ids", ends)

    def _kind(self, number: int, token: str | None) -> int:
        if token is None:
            return _UNUSED
        if token == self._model.get("unk_token") and self._model.get("byte_fallback"):
            return _UNKNOWN
        if number in self._added:
            return _CONTROL if self._added[number]["special"] else _OWN
        is_byte = self._model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")
        return _BYTE if is_byte else _NORMAL


def _name_of(cutter: dict[str, Any] | None) -> str:
    steps = () if cutter is None else cutter["pretokenizers"] if cutter["type"] == "Sequence" else (cutter,)
    cuts = tuple(word for step in steps if (word := _word(step)))
    if cuts not in _CUTS:
        raise ValueError("llama.cpp has no name for how its tokenizer cuts text, or none that is known here")
    return _CUTS[cuts]


def _word(step: dict[str, Any]) -> str:
    if step["type"] == "Split":
        return str(step["pattern"].get("Regex", step["pattern"]))
    if step["type"] == "Digits":
        return "digits" if step["individual_digits"] else "groups of digits"
    if step["type"] == "ByteLevel":
        return "bytes" if step.get("use_regex", True) else ""
    return str(step["type"])
