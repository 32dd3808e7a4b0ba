"""A model directory that has only what the loop reads, and an engine with the real one's interface that trains nothing.

The engine "learns" a number that depends on every batch it was given, in order, so that a lost or repeated batch shows.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from plan_changes import plan_of_fields
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headrace.plan.value.plan import Plan
from headrace.plan.value.results import Results
from headrace.report import Reporter
from headrace.runs import Engines
from headrace.runs.protocols import StateKind
from headrace.terms.events import Committed, Evaluation, Event, Notice, OpDone, Planned, StepResult
from headrace.terms.forms import UnitFigures, home_of
from headrace.terms.options.options import Options
from headrace.terms.saving import Saved, Saving
from headrace.update import rule_of
from headrace.update.rules.adamw import AdamW


def write_model(directory: Path, **config: object) -> Path:
    """Write `config.json` and a tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["water flows to the turbine"], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.save_pretrained(str(directory))
    values = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 256} | config
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def write_data(path: Path, samples: int = 40) -> Path:
    """Write JSON lines with a column `text`."""
    path.write_text("".join(json.dumps({"text": f"sample {i}: " + "water " * (i % 7 + 1)}) + "\n" for i in range(samples)))
    return path


def run_options(folder: Path, **more: Any) -> dict[str, Any]:
    """Return what a run is given: a model and data made in `folder`, where its directory will lie, and `more`."""
    (folder / "model").mkdir()
    return {
        "model": write_model(folder / "model"),
        "data": str(write_data(folder / "data.jsonl")),
        "output": folder / "run",
        "cache": folder / "cache",
        "sequence_length": 32,
        "tokens_per_step": 64,
    } | more


def fake_plan() -> Plan:
    """A plan that the forecast can simulate: two blocks, all in host memory."""
    return plan_of_fields(
        rule=rule_of(AdamW(), "bfloat16").figures,
        compute_dtype="bfloat16",
        gradient_dtype="bfloat16",
        separate_device=False,
        units=tuple(
            UnitFigures(name=name, num_elements=8192, num_parameters=8000, home=home_of(index, 2))
            for index, name in enumerate(("first", "1", "2", "last"))
        ),
        num_blocks=2,
        tied=False,
        sequence_length=32,
        tokens_per_step=64,
        micro_batch_sequences=2,
        num_micro_batches=1,
        hidden_size_bytes=128,
        loss_chunk_tokens=64,
        update_policy="immediate",
        held_gradients="host",
        late_units=(),
        checkpoint_every=1,
        host_slots=2,
        device_slots=0,
        prefetch=1,
        chunk_elements=4096,
        state_slots=3,
        gradient_slots=2,
        resident_states=(),
        accumulate=False,
        stash_tiers=("device", "device"),
        stash_slots=0,
        kept=((), ()),
        kept_bytes=(0, 0),
        skipped=((), ()),
        operators=((), ()),
        compute_threads=1,
        update_threads=1,
        results=Results(
            forward_flops=(0.0, 1e6, 1e6, 0.0),
            epilogue_flops=1e6,
            peak_bytes={"host": {"weights": 1024, "states": 1024}, "ssd": {"states, two slots": 4096, "scratch": 0}},
            allowed_bytes={"host": 4096, "ssd": 8192},
            notes=("everything fits",),
        ),
    )


class FakeEngine:
    """Commits every step to `fake.json`. `script` maps a step index to what happens in it: a callable."""

    def __init__(self, directory: Path, state: dict[str, Any], sink: Any, script: Mapping[int, Any]) -> None:
        self.directory, self.state, self.sink, self.script = directory, state, sink, script
        self.plan, self.batches, self.closed = fake_plan(), [], False
        self.evaluated: list[Mapping[str, torch.Tensor]] = []
        self.evaluating: Mapping[int, Any] = {}
        self.losses: Mapping[int, float] = {}
        self.step_seconds = 0.25
        self.asked_again: list[int] = []  # after which steps another plan was looked for
        self.other_plans: list[Any] = []  # what is found then

    @property
    def step_index(self) -> int:
        return int(self.state["steps"])

    @property
    def position(self) -> Any:
        return self.state["position"]

    export_notes: tuple[str, ...] = ()

    @property
    def provenance(self) -> dict[str, Any]:
        return {"run_id": str(self.directory), "steps": self.step_index}

    def step(self, batch: Mapping[str, torch.Tensor], *, position: Any = None) -> StepResult:
        self.batches.append(batch)
        index = self.step_index
        if index in self.script:
            self.script[index]()
        digest = zlib.crc32(batch["input_ids"].numpy().tobytes(), int(self.state["digest"]))
        lane = {"lane": "compute", "unit": 0, "micro": 0, "chunk": -1, "bytes": 0}
        self.sink(OpDone(step=index, label="forward", verb="forward", start_seconds=index, stop_seconds=index + 0.5, **lane))
        result = StepResult(
            step=index,  # counted from 0, as the engine does
            loss=1.0 + digest % 1000 / 1000,
            grad_norm=0.5,
            learning_rate=1e-5,
            tokens=batch["input_ids"].numel(),
            trained_tokens=int((batch["labels"] != -100).sum()),
            seconds=self.step_seconds,
            bytes_read={"ssd": 10},
            bytes_written={"ssd": 12},
            peak_bytes={"host": 2000},
        )
        self.state = {"steps": index + 1, "digest": digest, "position": position}
        self.flush()
        self.sink(Committed(step=index, seconds=0.01))
        self.sink(result)
        return result

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> Evaluation:
        self.evaluated.append(batch)
        if self.step_index in self.evaluating:
            self.evaluating[self.step_index]()
        loss = self.losses.get(self.step_index, 2.0 - self.step_index / 100)
        return Evaluation(loss=loss, tokens=int((batch["labels"][:, 1:] != -100).sum()))

    def flush(self) -> None:
        (self.directory / "fake.json").write_text(json.dumps(self.state))

    def save_pretrained(self, out_dir: Path, notes: Mapping[str, str]) -> None:
        Path(out_dir).mkdir(exist_ok=True)
        for name, text in notes.items():
            (Path(out_dir) / name).write_text(text)
        (Path(out_dir) / "weights").write_text(str(self.state["digest"]))
        (Path(out_dir) / "config.json").write_text("{}")
        (Path(out_dir) / "headrace.json").write_text(json.dumps(self.provenance))

    def begin_saving(self, out_dir: Path, notes: Mapping[str, str]) -> Saving:
        self.save_pretrained(out_dir, notes)
        return Saved()

    def heed(self, check: Callable[[], None]) -> None:
        self.check = check

    def plan_again(self) -> Any:
        self.asked_again.append(self.step_index)
        found = self.other_plans.pop(0) if self.other_plans else None
        self.plan = found.plan if found else self.plan
        return found

    def remove_state(self) -> None:
        (self.directory / "fake.json").unlink()
        self.close()

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class FakeHost:
    """Makes engines and keeps what they were opened with."""

    def __init__(self, *, packing: bool = True, script: Mapping[int, Any] | None = None, fail: Exception | None = None) -> None:
        self.packing, self.script, self.fail = packing, script or {}, fail
        self.while_importing: Callable[[], None] = lambda: None
        self.evaluating: dict[int, Any] = {}  # what happens in an evaluation after so many steps
        self.losses: dict[int, float] = {}  # what it finds
        self.opened: list[tuple[Path, Options]] = []
        self.made: list[FakeEngine] = []
        self.discarded: list[Path] = []

    def engines(self) -> Engines:
        return Engines(
            self.open,
            self.resume,
            lambda model, length: "" if self.packing else "samples see each other",
            self.state_of,
            self.discarded.append,
        )

    def open(self, model: Path, options: Options, sink: Any, *, measure: Any = None, packed: Any = None) -> FakeEngine:
        if self.fail is not None:
            raise self.fail
        self.opened.append((model, options))
        sink(Planned(plan=fake_plan()))
        sink(Notice(text="a notice while opening"))
        self.while_importing()
        engine = self._make(Path(str(options.output)), {"steps": 0, "digest": 0, "position": None}, sink)
        engine.flush()  # the import is committed
        return engine

    def resume(self, run_directory: Path, *, sink: Any) -> FakeEngine:
        return self._make(run_directory, json.loads((run_directory / "fake.json").read_text()), sink)

    def state_of(self, run_directory: Path) -> StateKind:
        return StateKind.COMMITTED if (run_directory / "fake.json").exists() else StateKind.NONE

    def _make(self, directory: Path, state: dict[str, Any], sink: Any) -> FakeEngine:
        engine = FakeEngine(directory, state, sink, self.script)
        engine.evaluating, engine.losses = self.evaluating, self.losses
        self.made.append(engine)
        return engine


class Screen:
    """A display that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.events: list[Event] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def progress(self, total_steps: int) -> Reporter:
        self.total_steps = total_steps
        return self

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.events.append(Notice(text="closed"))
