"""Files that others wrote, or a drive changed: read, or refused in our words; never another error, nor the memory they ask for.

Each reader gets its own file with bytes changed, cut or put in, and, where it is JSON, with values of other kinds. Damaged
GGUF files are in tests/compress/test_gguf_models.py, rows of data and tokenizers in tests/data.

Run: pytest tests/cli/test_foreign_files.py
"""

import contextlib
import json
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_worlds import World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutated import mutated
from tiers import sampled

from headrace.data.batches.open_data import read_model_config
from headrace.files.yaml_options import from_yaml
from headrace.model.directory.checkpoint import _read_index
from headrace.model.stored.safetensors_file import read_header, read_tensor_rows
from headrace.plan.clock.machine_profiles import load_profile
from headrace.plan.search.given import load_plan
from headrace.report.lanes import read_recording
from headrace.report.metrics import read_records
from headrace.store import read_manifest
from headrace.store.manifest import MANIFEST_NAME
from headrace.store.record import CommitRecord, pack_record, unpack_record
from headrace.store.slots import GroupVersion
from headrace.terms.errors import HeadraceError

MOST_BYTES = 32 << 20
RUN_ID = "0123456789abcdef"
ROOT = Path(__file__).parents[2]


def read_safetensors(path: Path) -> None:
    for tensor in read_header(path).values():
        if tensor.dtype == "F32":
            list(read_tensor_rows(tensor))


@dataclass(frozen=True)
class Reader:
    """A reader of files called `name`; `content` is a sound one. `values` are its JSON values, if it has no others."""

    name: str
    read: Callable[[Path], object] = field(repr=False)
    content: bytes = field(repr=False)

    @property
    def values(self) -> Any:
        try:
            return json.loads(self.content)
        except ValueError:
            return None


def safetensors(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + np.arange(6, dtype=np.float32).tobytes()


HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
}
RECORD = CommitRecord(run_id=RUN_ID, sequence=5, payload={"step": 5}, groups=(GroupVersion(0, 5, (7, 9)),))
STEP = {"step": 1, "loss": 2.5, "tokens": 64, "seconds": 1.0}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 320}


class Readers:
    """The readers by name. Hypothesis prints nothing of them."""

    def __init__(self, found: list[Reader]) -> None:
        self.of = {each.name: each for each in found}.__getitem__


@pytest.fixture(scope="module")
def readers(trained: Path, template: Path) -> dict[str, Reader]:
    """The readers, with sound files of a run that has been."""
    run = trained / "run"
    found = [
        Reader("model.safetensors", read_safetensors, safetensors(HEADER)),
        Reader("model.safetensors.index.json", lambda path: _read_index(path.parent), b'{"weight_map": {"a": "b"}}'),
        Reader("config.json", lambda path: read_model_config(path.parent), json.dumps(CONFIG).encode()),
        Reader(MANIFEST_NAME, lambda path: read_manifest(path.parent), (run / MANIFEST_NAME).read_bytes()),
        Reader("commit.0", lambda path: unpack_record(path.read_bytes(), RUN_ID, [2]), pack_record(RECORD)),
        Reader("config.yaml", from_yaml, (run / "config.yaml").read_bytes()),
        Reader("plan.json", load_plan, (run / "plan.json").read_bytes()),
        Reader("profile.json", load_profile, next((ROOT / "headrace/plan/machines").glob("*.json")).read_bytes()),
        Reader("metrics.jsonl", read_records, f"{json.dumps(STEP)}\n{json.dumps(STEP | {'step': 2})}\n".encode()),
        Reader("timeline.json", read_recording, (run / "timeline.json").read_bytes()),
    ]
    return Readers(found)


NAMES = [
    *(
        "model.safetensors",
        "model.safetensors.index.json",
        "config.json",
        MANIFEST_NAME,
        "commit.0",
        "config.yaml",
        "plan.json",
    ),
    *("profile.json", "metrics.jsonl", "timeline.json"),
]


JUNK = [b"\xff" * 8, b"[" * 2000, b"\0" * 8, b"1e999", b"-1"]


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw `content` with some bytes changed, cut out, doubled or put in; most at the begin, where lengths are."""
    made = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, min(64, len(made))) | st.integers(0, len(made)))
        way = draw(st.sampled_from(("change", "cut", "insert", "end")))
        if way == "end":
            del made[place:]
        elif way == "cut":
            del made[place : place + draw(st.integers(1, 40))]
        else:
            junk = draw(st.binary(min_size=1, max_size=9) | st.sampled_from(JUNK))
            made[place : place + (len(junk) if way == "change" else 0)] = junk
    return bytes(made)


def read_or_refuse(reader: Reader, folder: Path, content: bytes) -> None:
    path = folder / reader.name
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(HeadraceError):
            reader.read(path)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES, f"{peak} bytes were taken to read {len(content)}"


FUZZED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.wide
@pytest.mark.parametrize("name", sampled(NAMES, ["model.safetensors", "commit.0"]))
@FUZZED
@given(data=st.data())
def test_damaged_bytes_are_read_or_refused(
    name: str, readers: Readers, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    reader = readers.of(name)
    read_or_refuse(reader, tmp_path_factory.getbasetemp(), data.draw(damaged(reader.content)))


@pytest.mark.parametrize("name", sampled(NAMES, [MANIFEST_NAME]))
@FUZZED
@given(data=st.data())
def test_values_of_other_kinds_are_read_or_refused(
    name: str, readers: Readers, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    reader = readers.of(name)
    if reader.values is None:
        pytest.skip("it is no JSON")
    content = json.dumps(data.draw(mutated(reader.values))).encode("utf-8", "surrogatepass")
    read_or_refuse(reader, tmp_path_factory.getbasetemp(), content)


@FUZZED
@given(header=mutated(HEADER))
def test_a_header_of_other_values_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, header: Any) -> None:
    read_or_refuse(Reader("header.safetensors", read_safetensors, b""), tmp_path_factory.getbasetemp(), safetensors(header))


class _Trap:
    """What would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", sampled(["pytorch_model.bin", "model.pt", "model.safetensors"], ["pytorch_model.bin"]))
def test_pickled_weights_are_refused_unread(world: World, name: str) -> None:
    trap = world.folder / "sprung"
    for shard in world.shards():
        shard.unlink()
    (world.model / "model.safetensors.index.json").unlink()
    (world.model / name).write_bytes(pickle.dumps({"model.norm.weight": _Trap(trap)}))
    said = world.train_refused()
    assert name in said
    assert not trap.exists()


def test_a_pickled_adapter_is_refused_unread(world: World) -> None:
    trap, adapter = world.folder / "sprung", world.folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({"x": _Trap(trap)}))
    assert "adapter_model" in world.train_refused(adapter=f"lora:from={adapter}")
    assert not trap.exists()
