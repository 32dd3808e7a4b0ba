"""Options are declared once: the file, the command line, docs/options.md and the record of a run say what the declaration says.

Run: pytest tests/terms/options/test_options.py
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headrace.cli.sections import with_options
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.errors import ConfigError
from headrace.terms.options.compress_options import CompressOptions
from headrace.terms.options.declared import Declaration, Declared, option
from headrace.terms.options.eval_options import EvalOptions
from headrace.terms.options.generate_options import GenerateOptions
from headrace.terms.options.optimizer import ParameterGroup
from headrace.terms.options.option_kinds import Number
from headrace.terms.options.options import Options
from headrace.terms.options.plan_options import PlanOptions
from headrace.terms.options.run_options import NodeOptions, RunOptions
from headrace.terms.options.serve_options import ServeOptions
from headrace.update.rules.adamw import AdamW
from headrace.update.rules.table import RULES, optimizer_of
from headrace.update.wires import WIRES

OPTIONS = (Path(__file__).parents[3] / "docs" / "options.md").read_text(encoding="utf-8")
SECTIONS: dict[str, type[Declared]] = {
    "Training": RunOptions,
    "Answers": GenerateOptions,
    "Serve": ServeOptions,
    "Evaluation": EvalOptions,
    "Compress": CompressOptions,
    "A node": NodeOptions,
}
# What `plan` alone is asked: of data, of a generation, of a compression, of a node and its workers.
PLAN_ALONE = {"--data", "--json", "--generate", "--prompt-length", "--new-tokens", "--batch", "--compress"}


@dataclass(frozen=True, kw_only=True)
class WithMomentum(RunOptions):
    """One more option."""

    momentum: float = option(0.9, Number(0, 1), "How much of the last update stays.")


def test_an_option_is_one_declaration() -> None:
    command = typer.Typer(rich_markup_mode=None)
    given: list[WithMomentum] = []

    @command.command()
    @with_options(WithMomentum.declarations())
    def train(model: str, **options: Any) -> None:
        given.append(WithMomentum.of({"model": model, "data": "d"} | options))

    told = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    assert re.search(r"--momentum <?\w+>? How much of the last update stays\. Default: 0\.9\.", told, re.IGNORECASE), told
    assert CliRunner().invoke(command, ["m", "--momentum", "0.8", "--no-packing"]).exit_code == 0
    assert (given[0].momentum, given[0].packing, given[0].learning_rate) == (0.8, False, 1e-5)
    with pytest.raises(ConfigError, match="momentum: expected a number >= 0 and <= 1, found 2"):
        replace(given[0], momentum=2)
    row = next(each.docs_row for each in WithMomentum.declarations() if each.key == "momentum")
    assert row == "| `momentum` | 0.9 | how much of the last update stays |"


def table(section: str) -> list[str]:
    part = OPTIONS.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [line for line in part.splitlines() if line.startswith("| `")]


def test_the_tables_of_the_options_page_are_the_declarations() -> None:
    """What a command shares with one above it is not said again."""
    known: set[str] = set()
    for section, kind in SECTIONS.items():
        rows = [each.docs_row for each in kind.declarations()]
        assert table(section) == [row for row in rows if row not in known], section
        known.update(rows)


@pytest.mark.parametrize(("section", "named_by"), [("update rules", ""), ("gradients", "gradient"), ("adapters", "adapter")])
def test_the_tables_of_settings_are_the_declarations(section: str, named_by: str) -> None:
    """DoRA has LoRA's, and the page says so."""
    kinds = [kind for kind in WIRES if kind.named_by == named_by] if named_by else RULES
    settings = {kind.name: [each.docs_row for each in kind.settings()] for kind in kinds}
    if settings.get("dora"):
        assert settings.pop("dora") == settings["lora"]
        assert "`dora` has the settings of `lora`" in OPTIONS
    rows = [row.replace("| `", f"| `{name}:", 1) for name, own in settings.items() for row in own]
    assert table(f"Settings of {section}") == rows


def test_the_options_page_names_the_keys_that_are_no_options() -> None:
    said = re.search(r"only (.*) have no option", OPTIONS)
    assert said
    keys_only = {each.key for each in RunOptions.declarations() if each.flag is None and not each.required}
    assert set(re.findall(r"`(\w+)`", said[1])) == keys_only


@pytest.mark.parametrize("command", ["train", "plan"])
def test_the_help_of_a_command_is_the_declaration(command: str) -> None:
    from headrace.cli.app import app

    # So wide that no line is broken, which is also done within words that have a hyphen.
    told = " ".join(CliRunner().invoke(app, [command, "--help"], terminal_width=1000).output.split())
    declared: Iterator[Declaration] = iter(RunOptions.declarations() if command == "train" else PlanOptions.declarations())
    flags = {each.flag: each for each in declared if each.flag is not None}
    for flag, each in flags.items():
        assert re.search(rf"{flag} [^.]*{re.escape(each.command_help)}", told), flag
    shown = {word.replace("--no-", "--") for word in re.findall(r"--[a-z][a-z-]+", told.split("Most used:")[1])}
    others = {"--help"} | (PLAN_ALONE if command == "plan" else {"--node", "--wait", "--secret", "--stages", "--stage"})
    assert shown == flags.keys() | others


def test_the_record_has_all_that_a_run_goes_on_with() -> None:
    groups = (ParameterGroup(pattern="embed", weight_decay=0.5),)
    options = RunOptions(
        model=Path("m"),
        data=("d",),
        ssd=["/a"],
        host_memory="3GiB",
        learning_rate=2e-5,
        parameter_groups=groups,
        machine=load_profile("rtx4090-4ssd"),
        max_steps=7,
        lr_schedule="cosine",
    )
    record = json.loads(json.dumps(options.to_record()))
    found = Options.from_record(record)
    assert {key: getattr(found, key) for key in record} == {key: getattr(options, key) for key in record}
    assert optimizer_of(found) == AdamW(lr=2e-5, groups=groups)
    assert not {"output", "ssd", "plan", "model", "data"} & record.keys()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gradient_dtype": "float16"}, "gradient_dtype: 'float16' is neither float32 nor the compute dtype bfloat16"),
        ({"compile_blocks": True, "liger": True}, "give one of them"),
        ({"seed": True}, "seed: expected a whole number from 0 to .*, found True"),
        ({"ssd": [3]}, "ssd.0: expected a path, found 3"),
        ({"keep_state": "maybe", "max_steps": 0}, "max_steps: .*; keep_state: expected true or false, found 'maybe'"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunOptions(model=Path("m"), data=("d",), **values)


def test_clipping_to_nothing_is_no_clipping() -> None:
    assert Options(max_grad_norm=0).max_grad_norm is Options(max_grad_norm=None).max_grad_norm is None
