"""Models in GGUF files: what transformers itself makes of them, by every command; cut and damaged files are refused in a line.

Run: pytest tests/compress/test_gguf_models.py
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compressing import write_model
from gguf_models import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiers import sampled
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from headrace.cli import main
from headrace.codec.published.gguf_blocks import BLOCKS
from headrace.compress.decompression import decompress_model
from headrace.generate.passes.generator import Generator
from headrace.model import Checkpoint
from headrace.model.gguf.gguf_directory import gguf_directory
from headrace.terms.errors import InputError, ModelError


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gguf") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def file(dense: Path) -> Path:
    write_gguf(dense, dense.parent / "model.gguf", "Q8_0")
    return dense.parent / "model.gguf"


@pytest.mark.parametrize("kind", sampled(["Q8_0", "F16", "BF16", "F32"]))
def test_weights_are_those_of_transformers_own_reader(kind: str, dense: Path, tmp_path: Path) -> None:
    expected = write_gguf(dense, tmp_path / "model.gguf", kind)
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "cache")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    found = load_file(decompress_model(directory, tmp_path / "plain") / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name]), name
        assert torch.equal(tensor.float(), stock[name]), name


@pytest.mark.wide
@pytest.mark.parametrize("kind", sampled(["F16", "BF16"]))
def test_numbers_of_16_bits_answer_as_the_model_that_they_were(kind: str, dense: Path, tmp_path: Path) -> None:
    """Rows of queries and keys have another order in the file, and all else is read in place."""
    write_gguf(dense, tmp_path / "model.gguf", kind)
    directory = gguf_directory(tmp_path / "model.gguf", tmp_path / "cache")
    assert Checkpoint.open(directory, decode=True).main_dtype == {"F16": "float16", "BF16": "bfloat16"}[kind]
    answers = []
    for model in (dense, directory):
        with Generator.open(model, compute_dtype="float32") as generator:
            settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            answers.append(list(generator.generate([[5, 7, 11, 200]], **settings)))
    assert answers[0] == answers[1]


def test_texts_are_the_same_tokens(dense: Path, file: Path, tmp_path: Path) -> None:
    own, found = (AutoTokenizer.from_pretrained(each) for each in (dense, gguf_directory(file, tmp_path)))
    for text in ("water flows to the turbine", "Überläufe: 42 m³/s\n\n\t", "<eos>"):
        assert own(text).input_ids == found(text).input_ids
        assert found.decode(found(text).input_ids) == text


def test_a_directory_is_made_once_and_again_for_another_file(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "copy.gguf"))
    first = gguf_directory(copy, tmp_path / "cache")
    assert gguf_directory(copy, tmp_path / "cache") == first
    with copy.open("ab") as more:
        more.write(b"more")
    with pytest.raises(ModelError, match="give the GGUF file again"):
        Checkpoint.open(first, decode=True)
    assert gguf_directory(copy, tmp_path / "cache") != first
    copy.unlink()
    with pytest.raises(ModelError, match="are gone"):
        Checkpoint.open(first, decode=True)


def test_answers_end_where_a_file_says_that_turns_end(dense: Path, tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    write_gguf(dense, tmp_path / "model.gguf", "F16", ends)
    found = GenerationConfig.from_pretrained(gguf_directory(tmp_path / "model.gguf", tmp_path / "cache"))
    assert found.eos_token_id == [0, 5, 7]


def test_one_of_several_files_is_refused_by_name(dense: Path, tmp_path: Path) -> None:
    write_gguf(dense, tmp_path / "m-00001-of-00002.gguf", "F16", {"split.count": 2, "split.no": 0})
    with pytest.raises(ModelError, match=r"m-00001-of-00002\.gguf: is one of 2 files"):
        gguf_directory(tmp_path / "m-00001-of-00002.gguf", tmp_path / "cache")


def test_a_type_that_is_not_read_is_named(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(dense, tmp_path / "model.gguf", "Q5_0")
    monkeypatch.delitem(BLOCKS, "Q5_0")
    with pytest.raises(ModelError, match=r"is of type Q5_0; read are Q8_0, Q4_0, Q4_K"):
        gguf_directory(tmp_path / "model.gguf", tmp_path / "cache")
    assert not [*tmp_path.glob("cache/gguf/*")]


def damaged(content: bytes) -> Iterator[bytes]:
    yield from (content[:size] for size in (0, 4, 24, 200, len(content) // 2, len(content) - 1))
    yield b"GGML" + content[4:]
    yield content[:8] + b"\xff" * 16 + content[24:]


def test_a_cut_file_is_one_line_and_exit_code_2(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, content in enumerate(damaged(file.read_bytes())):
        cut = tmp_path / f"{number}.gguf"
        cut.write_bytes(content)
        with pytest.raises(SystemExit, match="2"):
            main(["generate", str(cut), "--prompt", "water"])
        words = capfd.readouterr().err.strip().splitlines()
        assert len(words) == 1, words
        assert words[0].startswith("error: ")
    assert not [*(tmp_path / "cache").rglob("config.json")]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_read(data: st.DataObject, file: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Numbers and letters of the header change, or the file ends there: no other error, no endless work."""
    folder, content = tmp_path_factory.mktemp("damaged"), bytearray(file.read_bytes())
    header = content.index(b"output_norm.weight") + 60
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, header - 1))
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(4, len(content))) :]
    (folder / "model.gguf").write_bytes(content)
    words = ""
    try:
        directory = gguf_directory(folder / "model.gguf", folder / "cache")
        with Generator.open(directory) as generator:
            assert generator.model.chain.num_blocks
    except InputError as error:
        words = str(error)
    finally:
        shutil.rmtree(folder)
    assert "\n" not in words


def test_plan_reads_a_gguf_file(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SystemExit, match="0"):
        main(["plan", str(file), "--generate", "--json"])
    assert json.loads(capfd.readouterr().out)["uncoded"] is not None, "the plan is that of the coded weights"
