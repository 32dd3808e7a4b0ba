"""No configuration ends in a traceback, and none is opened for ever: each is opened, or refused by an error of ours."""

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutated import JUNK, mutated
from tiers import sampled
from tiny_architectures import CONFIGS, make_config, make_plain

from headrace import Engine, Options
from headrace.ask.answer import plan_model
from headrace.ask.model_config import read_parts
from headrace.data.batches.open_data import read_model_config, with_lengths
from headrace.generate.passes.opened import GenerationModel
from headrace.model import Checkpoint, self_check
from headrace.terms.errors import HeadraceError, ModelError
from headrace.terms.options.budget import Budget
from headrace.terms.options.run_options import RunOptions

_SIZES = (2, 3, 16, 31, 33, 64, 159, 161, 4097, 10**5, 10**6, 2**24, 2**28, 2**31, 2**40)
_WORDS = ("float16", "bool", "int4", "gelu", "eager", "llama", "mixtral", "gpt2", "bert", "t5", "yarn", "linear", "dynamic")
_PARTS = (
    *(
        {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}
        for kind in ("yarn", "linear", "dynamic", "llama3", "longrope", "?")
    ),
    *({"quant_method": kind} for kind in ("fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "gptq", "?", None, 3)),
    *(["full_attention"] * 3, ["sliding_attention"] * 3, ["full_attention"] * 2, ["?"] * 3, [0, 1, 2], {"0": "x"}),
)
# Keys that files of other versions and other architectures have.
_MORE = {
    "quantization_config": None,
    "rope_scaling": None,
    "layer_types": None,
    "sliding_window": None,
    "layerdrop": 0.0,
    "text_config": None,
    "auto_map": None,
    "num_local_experts": None,
    "n_positions": None,
    "pruned_heads": {},
    "problem_type": None,
    "torch_dtype": None,
    "_attn_implementation": None,
    "experts_implementation": None,
}
# Far more CPU time than any of them takes; what is beyond would not end.
_MOST_CPU_SECONDS = 60.0
_BUDGET = Budget(host="4GiB")


def _train(model: Path) -> None:
    with_lengths(RunOptions(model=model, data=("none",)))
    options = Options(
        host_memory="4GiB", tokens_per_step=32, sequence_length=16, output=model.parent / "run", compute_dtype="float32"
    )
    Engine.open(model, options).close()


def _generate(model: Path) -> None:
    GenerationModel.of_directory(model, _BUDGET, None, None).close()


def _evaluate(model: Path) -> None:
    GenerationModel.of_directory(model, _BUDGET, None, None, self_check).close()


def _plan(model: Path) -> None:
    plan_model(model, Options(host_memory="4GiB"), here=False, variants_seconds=0.0)


WAYS: dict[str, Callable[[Path], None]] = {"train": _train, "generate": _generate, "eval": _evaluate, "plan": _plan}
MODELS = ("llama", "mixtral", "gpt2", "gemma3", "qwen3-moe", "mamba2")
_CASES = [(name, way) for name in MODELS for way in WAYS]
_QUICK = (("llama", "eval"), ("mixtral", "generate"), ("gpt2", "plan"))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def saved(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_plain(make_config(CONFIGS[name])).save_pretrained(made[name])
        return made[name]

    return saved


@contextmanager
def _bounded() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"not opened or refused within {_MOST_CPU_SECONDS:g} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _opened(way: str, model: Path, values: Any) -> None:
    """Open `model` with another config.json in that way; a refusal of ours is all that may come of it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        place.mkdir()
        for file in model.iterdir():
            (place / file.name).symlink_to(file)
        (place / "config.json").unlink()
        (place / "config.json").write_text(json.dumps(values), encoding="utf-8")
        refusal = ""
        with _bounded():
            try:
                WAYS[way](place)
            except HeadraceError as error:
                refusal = str(error)
        assert len(refusal) < 2500, refusal


@pytest.mark.parametrize("count", [65537, 2**28, 2**70, 10**400, 1e308])
@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_experts", "text_config"])
def test_counts_that_no_model_has_are_refused_before_anything_is_built(key: str, count: float, tmp_path: Path) -> None:
    text = json.dumps({"model_type": "llama", key: {"num_layers": count} if key == "text_config" else count})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    for read in (Checkpoint.open, read_parts, read_model_config):
        with pytest.raises(ModelError, match=r"(layers?|experts) is [\de.+]*; at most"):
            read(tmp_path)


@pytest.mark.parametrize(("name", "way"), sampled(_CASES, _QUICK))
def test_a_mutated_configuration_is_opened_or_refused(name: str, way: str, plain: Callable[[str], Path]) -> None:
    model = plain(name)
    values = json.loads((model / "config.json").read_text(encoding="utf-8"))
    junk = (*JUNK[:-1], *_SIZES, *_SIZES, *_WORDS, *_PARTS)
    some = mutated(values, junk) | mutated(values | _MORE, junk) | st.sampled_from(junk)

    @settings(max_examples=4 if (name, way) in _QUICK else 100, suppress_health_check=list(HealthCheck))
    @given(some)
    def opened(values: Any) -> None:
        _opened(way, model, values)

    opened()
