"""Models of several parts: the text model is found, computes what it does inside, and goes back among the others."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import DTYPES, import_all, values_of
from saved_models import save as save_text_model
from test_checkpoint import assert_same_files
from tiers import sampled
from tiny_wholes import DIFFERING, REFUSED, WHOLES, WITH_PICTURES_ONLY, make_whole
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from headrace.ask.model_config import read_parts
from headrace.model import Checkpoint, Exporter, build_skeleton, check_whole, self_check
from headrace.model.blocks.text_part import names_in_whole, text_part
from headrace.terms.errors import ModelError

WEIGHTS = "model.safetensors"


def save(tmp_path: Path, name: str, dtype: str = "float32") -> tuple[Path, Any]:
    """Save a whole model; return its directory, and what transformers makes of that in float32."""
    whole = make_whole(name).to(DTYPES[dtype])
    whole.save_pretrained(tmp_path / "model")
    return tmp_path / "model", type(whole).from_pretrained(tmp_path / "model", dtype=torch.float32)


def change_config(directory: Path, **values: Any) -> None:
    """Give a configuration other values; those in a dictionary are of a part, None takes out."""
    config = json.loads((directory / "config.json").read_text())
    for name, value in values.items():
        if isinstance(value, dict) and name in config:
            config[name] |= value
        else:
            config[name] = value
    (directory / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


# One of each structure: two kinds of attention, a tied head, experts, sound.
FEW = ("gemma3", "mistral3-tied", "qwen3_5_moe", "voxtral")


def text_parameters(whole: Any) -> set[str]:
    """The names of the text model's parameters in a whole model, by what transformers says of it."""
    modules = (whole.get_decoder(), whole.get_input_embeddings(), whole.get_output_embeddings())
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    return {name for name, parameter in whole.named_parameters(remove_duplicate=False) if id(parameter) in known}


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(itertools.product(WHOLES, ["float32", "bfloat16"]), list(zip(FEW, ["float32", "bfloat16"] * 2, strict=True))),
)
def test_the_text_model_computes_what_the_whole_one_does_and_goes_back_into_it(tmp_path: Path, name: str, dtype: str) -> None:
    directory, whole = save(tmp_path, name, dtype)
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    text = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32).eval()
    values = values_of(chain, planes)
    assert set(values) == {key for key, _ in text.named_parameters()}
    buffers = dict(chain.model.named_buffers())
    with torch.no_grad():
        for key, parameter in text.named_parameters():
            parameter.copy_(values[key])
        for key in set(text.state_dict()) & set(buffers):
            text.get_buffer(key).copy_(buffers[key])
        tokens = torch.arange(20, 52).reshape(2, 16)
        torch.testing.assert_close(text(tokens).logits, whole(input_ids=tokens).logits, rtol=1e-5, atol=1e-5)
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)
    assert (out / "config.json").read_bytes() == (directory / "config.json").read_bytes()


@pytest.mark.parametrize("name", sampled(WHOLES, FEW))
def test_training_changes_every_parameter_of_the_text_model_and_nothing_else(tmp_path: Path, name: str) -> None:
    directory, whole = save(tmp_path, name)
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    self_check(checkpoint.config)
    check_whole(checkpoint.config, checkpoint.whole)
    for weight, _ in planes:
        weight ^= 0x40  # "training": another value for every weight
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    before, after = whole.state_dict(), type(whole).from_pretrained(out).state_dict()
    assert set(before) == set(after)
    assert {key for key in before if not torch.equal(before[key], after[key])} == text_parameters(whole)
    assert set(load_file(directory / WEIGHTS)) == set(load_file(out / WEIGHTS))
    note = chain.notes[-1]
    assert note == f"of {type(whole).__name__} the text model is trained; its other parts stay as they are"


@pytest.mark.parametrize("name", sampled(WHOLES, FEW))
def test_stored_names_may_be_those_of_the_modules(tmp_path: Path, name: str) -> None:
    """Releases of transformers before a rule for other names, and the bare modules, save so; experts are packed then."""
    directory, whole = save(tmp_path, name)
    by_rule = import_all(directory, "bfloat16")
    state = {key: value.clone() for key, value in whole.state_dict().items()}  # a tied head is stored a second time
    save_file(state, directory / WEIGHTS, metadata={"format": "pt"})
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    expected = values_of(by_rule[1], by_rule[2])
    found = values_of(chain, planes)
    assert set(found) == set(expected)
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)


@pytest.mark.parametrize(
    ("name", "tied"),
    sampled([("mistral3", False), ("mistral3-tied", True), ("mistral3-untied", False), ("gemma3", True), ("llama4", False)]),
)
def test_the_whole_model_decides_whether_the_head_is_tied(tmp_path: Path, name: str, tied: bool) -> None:
    directory, whole = save(tmp_path, name)
    assert (whole.get_input_embeddings().weight is whole.get_output_embeddings().weight) is tied
    assert Checkpoint.open(directory).config.tie_word_embeddings is tied
    assert read_parts(directory)[0].tie_word_embeddings is tied
    _, chain, _, _ = import_all(directory, "bfloat16")
    assert chain.tied is tied


def test_a_class_that_is_not_named_is_found_by_the_configuration(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "gemma3")
    change_config(directory, architectures=None)
    assert type(Checkpoint.open(directory).whole).__name__ == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize("architectures", [None, ["LlamaForCausalLM"], ["NoSuchClass"]])
def test_a_class_that_only_the_files_can_name_is_asked_for(tmp_path: Path, architectures: list[str] | None) -> None:
    directory, _ = save(tmp_path, "voxtral")
    change_config(directory, architectures=architectures)
    for config in (Checkpoint.open(directory).config, read_parts(directory)[0]):
        with pytest.raises(ModelError, match=r"VoxtralConfig .* several parts .* architectures .* no class"):
            self_check(config)


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_text_part_without_a_model_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    directory, _ = save(tmp_path, name)
    for config in (Checkpoint.open(directory).config, read_parts(directory)[0]):
        with pytest.raises(ModelError, match="no causal language model for its text part"):
            self_check(config)


@pytest.mark.parametrize(
    ("name", "reason"),
    [(name, "computes other logits from text than its text model alone, ") for name in DIFFERING]
    + [(name, "does not run on text alone: .*pixel_values") for name in WITH_PICTURES_ONLY],
)
def test_a_whole_that_computes_something_else_from_text_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    checkpoint = Checkpoint.open(save(tmp_path, name)[0])
    self_check(checkpoint.config)
    with pytest.raises(ModelError, match=reason):
        check_whole(checkpoint.config, checkpoint.whole)


@pytest.mark.wide
@pytest.mark.parametrize(
    "kind",
    sampled(["idefics3", "internvl", "lfm2_vl", "llava_onevision", "qwen2_audio", "smolvlm"], ["qwen2_audio", "smolvlm"]),
)
def test_more_families_have_a_text_model_that_computes_the_same(kind: str) -> None:
    """By their configurations as transformers has them, in full size: no weight is made."""
    changes: dict[str, Any] = {"qwen2_audio": {"architectures": ["Qwen2AudioForConditionalGeneration"]}}
    if kind in ("idefics3", "smolvlm"):  # some versions have one by default that is beyond the vocabulary
        changes[kind] = {"pad_token_id": 0}
    config = CONFIG_MAPPING[kind](**changes.get(kind, {}))
    text, whole = text_part(config)
    own = build_skeleton(text, torch.float32)
    assert set(names_in_whole(own, whole).values()) >= {name for name, _ in own.named_parameters()}
    check_whole(text, whole)


def test_a_text_model_that_is_refused_alone_is_refused_inside(tmp_path: Path) -> None:
    """The small models of this family give every block inputs of its own."""
    whole = make_whole("gemma4", hidden_size_per_layer_input=8, vocab_size_per_layer_input=160)
    whole.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Gemma4TextConfig: cannot be trained block by block"):
        self_check(Checkpoint.open(tmp_path).config)


def test_a_whole_that_transformers_cannot_build_is_refused(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "gemma3")
    change_config(directory, vision_config={"num_attention_heads": 5})
    for read in (Checkpoint.open, read_parts):
        with pytest.raises(
            ModelError, match=r"Gemma3ForConditionalGeneration: transformers cannot build the model: .*num_heads"
        ):
            read(directory)


def test_a_whole_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    """Two towers that compare pictures and text, the latter with what would be a language model of its own."""
    config = CONFIG_MAPPING["vision-text-dual-encoder"](
        vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 1},
        text_config={"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 160},
        architectures=["VisionTextDualEncoderModel"],
    )
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="VisionTextDualEncoderModel: no language model"):
        read_parts(tmp_path)[0]


def test_a_text_model_of_other_sizes_is_refused(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "gemma3")
    change_config(directory, text_config={"intermediate_size": 64})
    with pytest.raises(ModelError, match="mlp"):
        import_all(directory, "bfloat16")


def test_quantised_weights_of_the_whole_are_refused(tmp_path: Path) -> None:
    directory, _ = save(tmp_path, "gemma3")
    change_config(directory, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantised weights"):
        self_check(Checkpoint.open(directory).config)


def test_a_text_model_alone_is_no_part_whatever_else_its_files_hold(tmp_path: Path) -> None:
    """As files look from which somebody took the configuration of the text model, and left the pictures' weights."""
    directory, _ = save_text_model(tmp_path, "gemma3", "float32")
    stored = load_file(directory / WEIGHTS)
    save_file({**stored, "vision_tower.patch.weight": torch.ones(3)}, directory / WEIGHTS, metadata={"format": "pt"})
    checkpoint, chain, planes, _ = import_all(directory, "bfloat16")
    assert checkpoint.whole is None
    assert chain.notes == (
        "1 stored tensors that the model does not have (vision_tower.patch.weight): not trained, and exported as they came",
    )
    out = Exporter(checkpoint, chain, tmp_path / "out", lambda unit: planes[unit]).write()
    assert_same_files(directory, out)
