"""Profiles on disk are those that would be made: found by all that decides them, whole or not at all."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_profiles import MOST_VERSIONS, KeptProfiles, digest_of, forget_oldest, read, write
from transformers import AutoConfig

from headrace.model import Chain, profile
from headrace.model.costs.cost_profile import profile as profile_itself
from headrace.model.parts import head_rows
from headrace.terms.options.optimizer import Optimizer

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


def chain_of(dtype: str = "float32", **more: Any) -> Chain:
    return Chain.from_config(AutoConfig.for_model("llama", **SIZES | more), dtype, Optimizer())


def refuse(*words: Any, **named: Any) -> Any:
    raise AssertionError("it was profiled again")


def test_a_later_process_finds_what_was_profiled(tmp_path: Path) -> None:
    made = KeptProfiles(profile, tmp_path)(chain_of(), 1, 8)
    assert KeptProfiles(refuse, tmp_path)(chain_of(), 1, 8) == made


@pytest.mark.parametrize(
    ("chain", "shape", "options"),
    [
        ({"num_hidden_layers": 3}, (1, 8), {}),
        ({"dtype": "bfloat16"}, (1, 8), {}),
        ({}, (2, 8), {}),
        ({}, (1, 8), {"for_gpu": True}),
    ],
)
def test_what_differs_is_profiled(
    chain: dict[str, Any], shape: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    KeptProfiles(profile, tmp_path)(chain_of(), 1, 8)
    with pytest.raises(AssertionError, match="profiled again"):
        KeptProfiles(refuse, tmp_path)(chain_of(**chain), *shape, **options)


def test_a_test_that_exchanges_something_keeps_nothing(tmp_path: Path) -> None:
    profiles = KeptProfiles(profile, tmp_path)
    profiles.exchanged = lambda: [torch]
    profiles(chain_of(), 1, 8)
    with pytest.raises(AssertionError, match="profiled again"):
        KeptProfiles(refuse, tmp_path)(chain_of(), 1, 8)


@pytest.mark.parametrize("exchanged", [head_rows, Chain])
def test_code_that_decides_and_is_exchanged_has_profiles_of_its_own(exchanged: Any, tmp_path: Path) -> None:
    costs = iter(("plain", "exchanged", "exchanged again"))
    profiles = KeptProfiles(lambda *words, **named: next(costs), None)
    assert profiles(chain_of(), 1, 8) == "plain"
    profiles.exchanged = lambda: [exchanged]
    assert [profiles(chain_of(), 1, 8) for _ in range(2)] == ["exchanged", "exchanged again"]
    profiles.exchanged = list
    assert profiles(chain_of(), 1, 8) == "plain"


def test_a_model_of_other_code_is_not_kept(tmp_path: Path) -> None:
    class Other(torch.nn.Linear):
        pass

    chain = chain_of()
    chain.model.other = Other(1, 1)
    KeptProfiles(lambda *words, **named: "its costs", tmp_path)(chain, 1, 8)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_code_that_changes_has_another_digest(tmp_path: Path) -> None:
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    digests = set()
    for texts in (("x", "y"), ("xy", ""), ("x", "z")):
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        digests.add(digest_of(paths))
    assert len(digests) == 3


@pytest.mark.parametrize("damage", [b"", b"\x80", b"no pickle"])
def test_a_damaged_file_is_as_good_as_none(damage: bytes, tmp_path: Path) -> None:
    KeptProfiles(profile, tmp_path)(chain_of(), 1, 8)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    path.write_bytes(damage)
    assert KeptProfiles(profile, tmp_path)(chain_of(), 1, 8) == profile_itself(chain_of(), 1, 8)


def test_many_that_write_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    value = list(range(10_000))
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(write, [(tmp_path / "kept", value)] * 40)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert read(tmp_path / "kept") == value


def test_old_versions_go(tmp_path: Path) -> None:
    for number in range(MOST_VERSIONS + 3):
        (tmp_path / f"{number}").mkdir()
    forget_oldest(tmp_path)
    assert len(list(tmp_path.iterdir())) == MOST_VERSIONS
