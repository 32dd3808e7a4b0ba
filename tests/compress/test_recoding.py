"""A model in a lossless code: every bit of it comes back, it computes what it did, and a killed compression goes on.

Run: pytest tests/compress/test_recoding.py
"""

import json
import signal
from pathlib import Path
from typing import Any

import compressing
import pytest
import torch
from compressing import EXPERTS, options, write_model
from forked import PROCESSES
from safetensors.torch import load_file, save_file
from saved_models import save
from test_compression import tensors_of
from test_frozen import adapted, evaluated
from test_generate_coded import KEPT, ROUTED, check_against_stock
from tiers import sampled
from tiny_architectures import CONFIGS
from tiny_wholes import WHOLES, make_whole

from headrace.compress.decompression import decompress_model
from headrace.compress.recoding import Recoded, recode
from headrace.compress.run import compress_model
from headrace.generate.passes.sources import ShardSource
from headrace.machine.host_memory import huge_page_buffer
from headrace.model import Chain, Checkpoint
from headrace.store.work import DONE
from headrace.terms.errors import ConfigError, ModelError, RunDirectoryError
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.optimizer import Optimizer

TO = "bf16x12"
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 321},
    "odd": {"intermediate_size": 97, "vocab_size": 321},
    "mixtral": {},
    "gemma2": {"head_dim": 16},
    "mamba": {},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "gpt_oss": {**EXPERTS, "head_dim": 16, "intermediate_size": 96, "num_hidden_layers": 2},
}


def asked(model: Path, folder: Path, **more: Any) -> CompressOptions:
    return CompressOptions.of({"model": model, "output": folder / "out", "to": TO, **more})


def recoded(model: Path, folder: Path, **more: Any) -> Recoded:
    folder.mkdir(exist_ok=True)
    return recode(asked(model, folder, **more))


def with_odd_numbers(model: Path) -> Path:
    """Put NaN with payloads, infinities, denormal numbers and signed zeros into every tensor of a model."""
    weights = load_file(model / "model.safetensors")
    odd = torch.tensor([0x7F81, 0xFFFF - 0x10000, 0x7F80, 1, 0x8001 - 0x10000, 0x8000 - 0x10000], dtype=torch.int16)
    for tensor in weights.values():
        flat = tensor.view(-1).view(torch.int16)
        flat[: len(odd)] = odd[: len(flat)]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {key: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, tensor in tensors.items()}


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(KINDS, ("tied", "mixtral")))
def test_every_bit_comes_back(kind: str, tmp_path: Path) -> None:
    model = with_odd_numbers(write_model(tmp_path / "model", "llama" if kind in ("odd", "tied") else kind, **KINDS[kind]))
    result = recoded(model, tmp_path)
    out = decompress_model(tmp_path / "out", tmp_path / "plain")
    assert bits(tensors_of(out)) == bits(tensors_of(model))
    assert json.loads((out / "config.json").read_text()) == json.loads((model / "config.json").read_text())
    assert {path.name for path in out.iterdir()} == {path.name for path in model.iterdir()}
    stored = tensors_of(tmp_path / "out")
    assert not any(
        len(tensor.shape) > 1 and tensor.dtype == torch.bfloat16 for key, tensor in stored.items() if key not in result.left
    )
    assert slots_of(tmp_path / "out") == slots_of(model), "also where plain tensors lie at odd bytes"
    assert result.bytes_after < result.bytes_before
    assert not (tmp_path / "out.unfinished").exists()


@pytest.fixture(scope="module")
def whole(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    recoded(dense, folder)
    return folder


@pytest.mark.wide
def test_a_generation_has_the_bits_of_the_model(dense: Path, whole: Path) -> None:
    check_against_stock(whole / "out", dense, "bfloat16")


@pytest.mark.deep
@pytest.mark.parametrize(("dtype", "device"), [("float32", None), ("float32", "64MiB"), ("bfloat16", "64MiB")])
def test_a_generation_has_the_bits_of_the_model_elsewhere(dense: Path, whole: Path, dtype: str, device: str | None) -> None:
    check_against_stock(whole / "out", dense, dtype, device)


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(["mixtral", "gpt_oss"], ["gpt_oss"]))
def test_experts_come_one_by_one(kind: str, tmp_path: Path) -> None:
    """Stored one by one, or in one stack, some of whose weights escape: only an expert's own escapes are read with it."""
    model = write_model(tmp_path / "model", kind, **KINDS[kind])
    weights = load_file(model / "model.safetensors")
    for key, tensor in weights.items():
        if "experts" in key and tensor.dim() > 1:
            flat = tensor.view(-1)
            flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(0))[: len(flat) // 50]] *= 2.0**-30
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    recoded(model, tmp_path)
    check_against_stock(tmp_path / "out", model, "bfloat16", apart=[ROUTED, KEPT])


@pytest.mark.wide
def test_adapters_and_losses_are_those_upon_the_model(dense: Path, whole: Path, tmp_path: Path) -> None:
    assert adapted(whole / "out", tmp_path / "run") == adapted(dense, tmp_path / "other")
    coded, plain = evaluated(whole / "out", tmp_path / "one"), evaluated(dense, tmp_path / "two")
    assert coded[0] == plain[0]
    assert coded[1] < plain[1], "fewer bytes on the drive"


MOMENTS = {f"call {calls}": calls for calls in (3, 25, 8, 14, 20, 30, 36, 42, 48)}


@pytest.mark.parametrize("calls", sampled(MOMENTS, ("call 3", "call 25")))
@pytest.mark.process
def test_killed_and_begun_again(dense: Path, whole: Path, tmp_path: Path, calls: str) -> None:
    process = PROCESSES.Process(target=compressing.run_and_be_killed, args=(dense, tmp_path, MOMENTS[calls], TO))
    process.start()
    process.join(250)
    assert process.exitcode == -signal.SIGKILL, "there are fewer calls than that"
    assert not (tmp_path / "out").exists()
    recoded(dense, tmp_path)
    assert compressing.files_of(tmp_path) == compressing.files_of(whole)
    assert not (tmp_path / "out.unfinished").exists()


def test_codes_of_large_files_wait_on_the_disk(
    dense: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are written to the same bytes."""
    for number, most in enumerate((0, 20_000)):
        monkeypatch.setattr("headrace.compress.recoding.MOST_BYTES_IN_MEMORY", most)
        recoded(dense, tmp_path / str(number))
        assert compressing.files_of(tmp_path / str(number)) == compressing.files_of(whole)


def test_it_goes_on_after_the_last_file_and_with_the_same_model_alone(dense: Path, whole: Path, tmp_path: Path) -> None:
    class Stopped(Exception):
        """Stands for whatever ends a process."""

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise Stopped

    said: list[str] = []
    with pytest.raises(Stopped):
        recode(asked(dense, tmp_path), say=say)
    with pytest.raises(RunDirectoryError, match="was begun with model"):
        recoded(write_model(tmp_path / "another"), tmp_path)
    assert len((tmp_path / "out.unfinished" / DONE).read_text().splitlines()) == 2
    said.clear()
    recode(asked(dense, tmp_path), say=lambda text: said.append(text))
    assert said[0] == "going on after file 2 of 4"
    assert compressing.files_of(tmp_path) == compressing.files_of(whole)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"data": "x.jsonl"}, "data: bf16x12 changes no weight"),
        ({"most_loss": 0.1}, "most_loss: bf16x12 changes no weight"),
        ({"experts_only": True}, "experts_only: bf16x12 changes no weight"),
        ({"group_size": 64}, "group_size: bf16x12 changes no weight"),
        ({"calibration_rows": 4}, "calibration_rows: bf16x12 changes no weight"),
    ],
)
def test_what_it_has_no_use_for_is_refused(more: dict[str, Any], words: str, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        recoded(dense, tmp_path, **more)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_coded_is_refused(whole: Path, tmp_path: Path) -> None:
    for dtype, words in ((torch.float32, "stored as F32"), (torch.float16, "stored as F16")):
        with pytest.raises(ModelError, match=f"none of its matrices can be coded as bf16x12 .*{words}"):
            recoded(write_model(tmp_path / words, dtype=dtype), tmp_path)
    with pytest.raises(ModelError, match=r"coded already \(headrace\)"):
        recoded(whole / "out", tmp_path)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(("out", ".out"))]


def test_codes_that_round_need_data(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data: int4 rounds weights for the inputs of real data; give --data FILE"):
        compress_model(options(dense, tmp_path, data=[]))
    for wrong, other in ((compress_model, TO), (recode, "int4")):
        with pytest.raises(ConfigError, match=f"to: {other} "):
            wrong(options(dense, tmp_path, to=other))


@pytest.mark.deep
def test_parts_that_are_damaged_or_missing_are_refused(whole: Path, tmp_path: Path) -> None:
    """In one line, as the directory is opened or as a row is decoded."""
    key = "model.layers.1.mlp.up_proj.weight"
    changes = {
        "missing": lambda part: None,
        "cut": lambda part: part[:-1].clone(),
        "of another kind": lambda part: part.float(),
    }
    for number, (name, (what, change)) in enumerate(
        (name, change) for name in ("low", "high", "bases", "escape_offsets", "escapes", "shape") for change in changes.items()
    ):
        coded = tmp_path / str(number)
        coded.mkdir()
        for path in (whole / "out").iterdir():
            if path.name != "compression.json":
                (coded / path.name).write_bytes(path.read_bytes())
        (file,) = [path for path in coded.glob("*.safetensors") if f"{key}_low" in load_file(path)]
        weights = load_file(file)
        part = change(weights.pop(f"{key}_{name}"))
        if part is not None:
            weights[f"{key}_{name}"] = part
        save_file(weights, file, {"format": "pt"})
        with pytest.raises(ModelError) as refused:
            decompress_model(coded, tmp_path / "plain")
        assert "\n" not in str(refused.value), (name, what)


def slots_of(directory: Path) -> dict[str, bytes]:
    """Return the bits of all parameters as passes read them, bfloat16."""
    checkpoint = Checkpoint.open(directory, decode=True)
    chain = Chain.from_config(checkpoint.config, "bfloat16", Optimizer())
    source = ShardSource(chain, chain.attach(checkpoint), lambda event: None, on_cpu=True)
    found = {}
    try:
        for unit, (layout, figures) in enumerate(zip(source.layouts, source.figures, strict=True)):
            read = huge_page_buffer(max(2 * layout.num_elements, figures.stored_bytes or 0))
            into = torch.zeros(layout.num_elements, dtype=torch.bfloat16)
            source.read(unit, read[: figures.stored_bytes or 2 * layout.num_elements])
            if figures.stored_bytes is None:
                into = torch.from_numpy(read[: 2 * layout.num_elements]).view(torch.bfloat16)
            else:
                source.make(unit, torch.from_numpy(read[: figures.stored_bytes]), None, into)
            for spec in layout.parameters:
                values = into[spec.offset : spec.offset + spec.num_elements]
                found[f"{unit} {spec.name}"] = values.view(torch.int16).numpy().tobytes()
    finally:
        source.close()
    return found


@pytest.mark.parametrize("name", sampled(CONFIGS, ("gpt2", "qwen3-moe")))
def test_every_architecture_has_its_bits(name: str, tmp_path: Path) -> None:
    """As a directory, and as passes read it."""
    model, _ = save(tmp_path, name)
    recoded(model, tmp_path)
    assert bits(tensors_of(decompress_model(tmp_path / "out", tmp_path / "plain"))) == bits(tensors_of(model))
    assert slots_of(tmp_path / "out") == slots_of(model)


@pytest.mark.parametrize("name", sampled(WHOLES, ("gemma3",)))
def test_every_part_of_a_larger_model_has_its_bits(name: str, tmp_path: Path) -> None:
    """The parts that see and hear, too."""
    make_whole(name).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    recoded(tmp_path / "model", tmp_path)
    assert bits(tensors_of(decompress_model(tmp_path / "out", tmp_path / "plain"))) == bits(tensors_of(tmp_path / "model"))
    assert slots_of(tmp_path / "out") == slots_of(tmp_path / "model")
