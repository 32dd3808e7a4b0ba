"""Every field of TrainingArguments, every argument and method of Trainer stands in one table: a new one fails here.

Run: pytest tests/integrations/test_trainer_arguments.py
"""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
from pages import generated
from trainer_tables import PAGE, SCRIPT, tables
from trainers import USUAL, Make, StopAfter
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from headrace.integrations.transformers import HeadraceTrainer, arguments
from headrace.integrations.transformers.arguments import check_arguments
from headrace.terms.errors import ConfigError, RunDirectoryError


def test_each_field_of_training_arguments_stands_in_one_table() -> None:
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    honoured, ignored, refused = arguments.HONOURED, arguments.IGNORED.keys(), arguments.REFUSED.keys()
    assert fields - honoured - ignored - refused == set(), "say what becomes of these, in arguments.py"
    assert honoured & ignored | honoured & refused | ignored & refused == set()


def test_each_argument_and_method_of_trainer_stands_in_one_table() -> None:
    given = set(inspect.signature(Trainer.__init__).parameters) - {"self"}
    assert given - {*arguments.ARGUMENTS_HONOURED} - arguments.ARGUMENTS_REFUSED.keys() == set()
    methods = {name for name, value in vars(Trainer).items() if callable(getattr(value, "__func__", value))}
    public = {name for name in methods if not name.startswith("_")}
    assert public - arguments.METHODS_HONOURED - arguments.METHODS_REFUSED.keys() == set()


def test_the_page_has_the_tables() -> None:
    assert generated(PAGE, SCRIPT) == tables(), f"run: PYTHONPATH=tests python {SCRIPT}"


REFUSED_VALUES: dict[str, Any] = {
    "optim_target_modules": ["q_proj"],
    "label_smoothing_factor": 0.1,
    "torch_compile_backend": "eager",
    "torch_compile_mode": "max-autotune",
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "push_to_hub": True,
    "use_cpu": True,
    "label_names": ["targets"],
    "debug": "underflow_overflow",
    "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "parallelism_config": "any",
}


@pytest.mark.parametrize("name", arguments.REFUSED)
def test_a_refused_field_is_named_with_what_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "gpu_is_there", lambda: True)
    args = TrainingArguments(output_dir=str(tmp_path / "run"))
    setattr(args, name, REFUSED_VALUES[name])  # some are checked by accelerate before they get here
    with pytest.raises(ConfigError, match=f"^{name}: .* is not done by HeadraceTrainer; "):
        check_arguments(args, {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", arguments.ARGUMENTS_REFUSED)
def test_a_refused_argument_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: HeadraceTrainer has none; "):
        check_arguments(TrainingArguments(output_dir=str(tmp_path / "run")), {name: print})


def test_what_is_refused_says_so_when_it_is_called(make: Make) -> None:
    trainer = make()
    for name in ("compute_loss", "prediction_step", "predict", "hyperparameter_search", "push_to_hub"):
        with pytest.raises(ConfigError, match=f"^{name}: HeadraceTrainer has none; "):
            getattr(trainer, name)()


@pytest.mark.parametrize("name", arguments.METHODS_REFUSED)
def test_a_subclass_cannot_replace_what_the_engine_does(name: str) -> None:
    own = type("Own", (HeadraceTrainer,), {name: lambda self, *given: None})
    with pytest.raises(ConfigError, match=rf"^Own\.{name}: HeadraceTrainer does not call it; "):
        own("models/none")


def test_what_is_set_and_ignored_is_noted_and_what_is_new_refused(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), save_only_model=True, torch_empty_cache_steps=3)
    assert [note.partition(":")[0] for note in check_arguments(args, {})] == [
        "save_only_model is ignored",
        "torch_empty_cache_steps is ignored",
    ]
    assert check_arguments(TrainingArguments(output_dir=str(tmp_path)), {}) == []
    assert arguments.gpu_is_there() or check_arguments(TrainingArguments(output_dir=str(tmp_path), use_cpu=True), {}) == []

    @dataclasses.dataclass
    class Newer(TrainingArguments):
        novelty: int = 0

    assert check_arguments(Newer(output_dir=str(tmp_path)), {}) == []
    with pytest.raises(ConfigError, match=r"^novelty: HeadraceTrainer does not know this field of Newer"):
        check_arguments(Newer(output_dir=str(tmp_path), novelty=1), {})


def test_defaults_are_made_to_compare_with_where_a_class_asks_for_a_gpu(tmp_path: Path) -> None:
    """SFTConfig of TRL computes in bfloat16 by default, which TrainingArguments takes on a GPU alone, or with use_cpu."""

    @dataclasses.dataclass
    class Asking(TrainingArguments):
        bf16: bool | None = None

        def __post_init__(self) -> None:
            if self.bf16 is None and not self.use_cpu:
                raise ValueError("bf16: there is no GPU")
            super().__post_init__()

    args = Asking(output_dir=str(tmp_path), bf16=False, use_cpu=not arguments.gpu_is_there(), save_only_model=True)
    assert [note.partition(":")[0] for note in check_arguments(args, {})] == ["save_only_model is ignored"]


@pytest.mark.parametrize("name", arguments.OTHER_CLASSES)
def test_arguments_of_trls_other_trainers_are_refused_by_name(name: str, make: Make, tmp_path: Path) -> None:
    """By any class that is made of theirs. They would train plain fine-tuning, on rows that are not desirable, too."""
    theirs = dataclasses.dataclass(type(name, (TrainingArguments,), {"__annotations__": {"beta": float}, "beta": 0.1}))
    own = type("Mine", (theirs,), {})
    with pytest.raises(ConfigError, match=rf"^args: {name} is not trained by HeadraceTrainer, .*--loss"):
        check_arguments(own(output_dir=str(tmp_path / "run")), {})


def test_a_run_is_let_go_when_nothing_holds_its_trainer(make: Make, talking: Path, texts: Any, tmp_path: Path) -> None:
    """A second one in one process goes on, as under stock Trainer; while the first is held, the refusal says what to call."""

    def trainer(*callbacks: Any) -> HeadraceTrainer:
        args = TrainingArguments(output_dir=str(tmp_path / "run"), **{**USUAL, "max_steps": 2})
        return HeadraceTrainer(talking, args, train_dataset=texts, cache=tmp_path / "cache", callbacks=[*callbacks])

    first = trainer(StopAfter(1))
    first.train()
    second = trainer()
    with pytest.raises(RunDirectoryError, match=r"another HeadraceTrainer of this process has the run .* trainer\.end\(\)"):
        second.train(resume_from_checkpoint=True)
    del first
    assert second.train(resume_from_checkpoint=True).global_step == 2
    second.close()


@pytest.mark.parametrize("optim", ["adafactor", "rmsprop", "adagrad"])
def test_a_rule_with_other_numbers_is_refused(make: Make, optim: str) -> None:
    with pytest.raises(ConfigError, match=r"^optim: the engine has no .* with the same numbers; use adamw_torch or sgd"):
        make(optim=optim).train()


def test_a_model_in_memory_is_refused(make: Make, talking: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model: HeadraceTrainer streams a model from its files; .* LlamaForCausalLM"):
        make(model=AutoModelForCausalLM.from_pretrained(talking))


def test_a_directory_that_holds_a_run_is_refused_and_other_checkpoints_are(make: Make, tmp_path: Path) -> None:
    first = make(save_strategy="steps", save_steps=2, max_steps=4)
    first.train()
    with pytest.raises(ConfigError, match=r"^train: this run has begun; go on with train\(resume_from_checkpoint=True\)"):
        first.train()
    first.end()
    again = make(max_steps=4)
    with pytest.raises(RunDirectoryError, match=r"holds a run; train\(resume_from_checkpoint=True\) goes on with it"):
        again.train()
    with pytest.raises(ConfigError, match=r"^resume_from_checkpoint: .*checkpoint-2 is not the newest step of the run"):
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4")).global_step == 4
    again.end()
    with pytest.raises(RunDirectoryError, match="holds no run; leave it out to begin one"):
        make("other").train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"^resume_from_checkpoint: weight_decay was 0.0, now it is 0.1; a run keeps it"):
        make(max_steps=4, weight_decay=0.1).train(resume_from_checkpoint=True)
