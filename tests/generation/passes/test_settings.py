"""Every setting of `generate` is computed as transformers computes it, or refused by name before any work."""

import contextlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from some_prompts import prompts
from tiers import sampled
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from headrace.generate.passes.generator import Generator
from headrace.generate.passes.micro_batches import SeatRows, until_end
from headrace.generate.passes.opened import read_generation_config
from headrace.model.seats.generation_keys import KEYS, KEYWORDS, resolved, try_generation_settings
from headrace.terms.errors import ConfigError, DataError, InputError
from headrace.terms.options.budget import Budget

OWN = {"do_sample": True, "top_k": 5, "repetition_penalty": 1.7, "eos_token_id": list(range(90, 160)), "pad_token_id": 0}
SAMPLED = {"do_sample": True, "max_new_tokens": 5, "eos_token_id": 2}
# Arguments that are computed; many of them alone would change nothing, so that each is tried where it counts.
COMPUTED: dict[str, dict[str, Any]] = {
    "top_k=None": {"top_k": None, "max_new_tokens": 5},
    "repetition_penalty=None": {"repetition_penalty": None, "do_sample": False, "max_new_tokens": 5},
    "eos_token_id=[]": {"eos_token_id": [], "max_new_tokens": 5},
    "eos_token_id=None": {"eos_token_id": None, "max_new_tokens": 5},
    "do_sample=None": {"do_sample": None, "max_new_tokens": 5},
    "all off": {"top_k": None, "repetition_penalty": None, "eos_token_id": None, "max_new_tokens": 5},
    "max_length": {"max_length": 15, "eos_token_id": 2},
    "max_length after max_new_tokens": {"max_length": 15, "max_new_tokens": 3, "eos_token_id": 2},
    "num_return_sequences": {**SAMPLED, "num_return_sequences": 2},
    "beams return several": {
        "num_beams": 3,
        "num_return_sequences": 2,
        "do_sample": False,
        "max_new_tokens": 4,
        "eos_token_id": 2,
    },
    "beam sample": {**SAMPLED, "num_beams": 2, "length_penalty": 0.5, "early_stopping": True},
    "min_new_tokens": {"min_new_tokens": 4, "max_new_tokens": 5, "do_sample": False},
    "min_length": {"min_length": 14, "max_new_tokens": 5, "do_sample": False},
    "warpers": {**SAMPLED, "temperature": 0.7, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "eta_cutoff": 0.01},
    "warpers, others": {**SAMPLED, "top_h": 0.5, "epsilon_cutoff": 0.001, "renormalize_logits": True},
    "ngrams": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 2, "do_sample": False, "max_new_tokens": 5},
    "penalties": {**SAMPLED, "encoder_repetition_penalty": 1.3, "exponential_decay_length_penalty": [1, 1.5]},
    "forced": {"forced_eos_token_id": 2, "forced_bos_token_id": 7, "do_sample": False, "max_new_tokens": 4},
    "suppressed": {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7], "bad_words_ids": [[8]], **SAMPLED},
    "bias": {"sequence_bias": [[[9], 3.0]], "remove_invalid_values": True, **SAMPLED},
    "watermark": {"watermarking_config": {"greenlist_ratio": 0.5, "bias": 3.0}, **SAMPLED},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2, "do_sample": False, "max_new_tokens": 5},
    "chunks": {"prefill_chunk_size": 4, **SAMPLED},
    "a configuration": {"generation_config": GenerationConfig(temperature=0.5, max_new_tokens=4)},
}
REFUSED: dict[str, dict[str, Any]] = {
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5, "do_sample": False},
    "constraints": {"constraints": [1]},
    "force_words_ids": {"force_words_ids": [[1]]},
    "dola_layers": {"dola_layers": "low"},
    "temperature": {"temperature": 0.0},
    "top_p": {"top_p": -1.0},
    "top_k": {"top_k": -1},
    "num_beams": {"num_beams": 0},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": False},
    "max_new_tokens": {"max_new_tokens": "9"},
    "max_length": {"max_length": 5},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "guidance_scale": {"guidance_scale": 1.5},
    "token_healing": {"token_healing": True},
    "stop_strings": {"stop_strings": ["x"]},
    "suppress_tokens": {"suppress_tokens": list(range(4096))},
    "inputs": {"inputs": torch.ones(1, 1)},
    "attention_mask": {"attention_mask": torch.ones(1, 1)},
    "custom_generate": {"custom_generate": "somebody/something"},
    "negative_prompt_ids": {"negative_prompt_ids": [1]},
    "top_kk": {"top_kk": 3},
    "generation_config": {"generation_config": {"top_k": 3}},
    "streamer": {"streamer": object()},
}


@pytest.fixture(scope="module")
def directory(directory_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose own configuration samples."""
    place = tmp_path_factory.mktemp("settings")
    for path in directory_of("llama").iterdir():
        (place / path.name).symlink_to(path)
    (place / "generation_config.json").unlink(missing_ok=True)
    (place / "generation_config.json").write_text(json.dumps(OWN))
    return place


@pytest.fixture(scope="module")
def generator(directory: Path) -> Any:
    with Generator.open(directory, Budget(host="4GiB"), compute_dtype="float32", rows=1) as found:
        yield found


@pytest.mark.parametrize("name", sampled(COMPUTED))
def test_what_is_computed_is_transformers_own(
    name: str, directory: Path, generator: Generator, stock: Callable[..., Any]
) -> None:
    asked, rows = COMPUTED[name], prompts(2)
    found = sorted(generator.generate(rows, seed=40, **dict(asked)), key=lambda each: each[0])
    expected, config = [], generator.model.checked(asked.get("generation_config"), _changes(asked))[0]
    order = [index for index, _ in found]
    seeds = {index: 40 + number for number, index in enumerate(_entered(rows))}
    for index, row in enumerate(rows):
        made = stock(directory, "float32", [row], seeds[index], asked)
        expected += [(index, until_end(each, config)) for each in made[:, len(row) :].tolist()]
    assert order == [index for index, _ in expected]
    assert found == expected


def _entered(rows: list[list[int]]) -> list[int]:
    from headrace.generate.plan.compose import composed

    return [index for (index,) in composed([len(row) for row in rows], [0] * len(rows), 1)]


def _changes(asked: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in asked.items() if key != "generation_config"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name_before_any_work(name: str, generator: Generator) -> None:
    before = generator.model.source.bytes_read
    with pytest.raises(ConfigError, match=name):
        generator.generate(prompts(2), **REFUSED[name])
    assert generator.model.source.bytes_read == before


def test_a_key_or_keyword_of_the_installed_transformers_is_in_the_table() -> None:
    assert {key for key in vars(GenerationConfig()) if key[0] != "_"} == {*KEYS}
    refused = {"inputs", "synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate"}
    known = {"self", "generation_config", "kwargs", *KEYWORDS, *refused}
    assert {*inspect.signature(GenerationMixin.generate).parameters} <= known


def test_a_seat_refuses_what_lies_within_blocks(generator: Generator) -> None:
    whole = generator.model.settings(9, None, {"max_new_tokens": 2})
    generator.prepare(1, 9, 2)
    for key in ("output_hidden_states", "output_attentions"):
        setattr(whole["generation_config"], key, True)
        with pytest.raises(ConfigError, match=key):
            list(generator.run([SeatRows(0, ((5, 6, 7),), 0, whole)]))
        setattr(whole["generation_config"], key, None)


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_token_beyond_the_embedding_is_refused(token: int, generator: Generator) -> None:
    with pytest.raises(DataError, match=f"prompt 1 has token {token}"):
        generator.generate([[5], [6, token]], max_new_tokens=1)
    with pytest.raises(DataError, match="empty"):
        generator.generate([[]], max_new_tokens=1)
    assert list(generator.generate([])) == []


FILES: dict[str, Any] = {
    "no_such_key": {"no_such_key": 3},
    "penalty_alpha": {"penalty_alpha": 0.6, "do_sample": False},
    "temperature": {"temperature": 0.0, "do_sample": True},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "do_sample": False},
    "max_new_tokens": {"max_new_tokens": "many"},
    "logits_processor": {"logits_processor": [1]},
    "expected an object": [1],
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_with_its_key(name: str, tmp_path: Path, generator: Generator) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(FILES[name]))
    with pytest.raises(InputError, match=name):
        _read(tmp_path, generator)


def _read(directory: Path, generator: Generator) -> Any:
    model = generator.model.chain.model
    found, rest = resolved(read_generation_config(directory, model), None, {})
    try_generation_settings(model, found, rest, generator.model.chain.vocabulary)
    return found


def test_an_unknown_key_without_a_value_passes(tmp_path: Path, generator: Generator) -> None:
    (tmp_path / "generation_config.json").write_text('{"some_key": null, "other": false, "third": [], "use_cache": false}')
    assert _read(tmp_path, generator).use_cache is True


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 600),
    st.floats(-2, 3),
    st.sampled_from(["", "x", "never", "dynamic", float("nan"), float("inf"), 1e-40]),
    st.recursive(st.integers(-2, 400), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(values=st.dictionaries(st.sampled_from([*sorted(KEYS), "other"]), VALUES, max_size=4))
def test_a_file_with_any_values_is_read_or_refused(
    values: dict[str, Any], generator: Generator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path_factory.mktemp("any")
    (place / "generation_config.json").write_text(json.dumps(values))
    with contextlib.suppress(InputError):
        _read(place, generator)
