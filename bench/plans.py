"""What `headrace plan` answers for 70 and 175 billion parameters, over memory, SSDs and tokens per step: `docs/log/plans.md`.

    python bench/plans.py                             # print
    python bench/plans.py --output docs/log/plans.md      # write
    python bench/plans.py --kept answers.jsonl        # in pieces: what a killed run has answered is not asked again

Each cell is what `headrace plan` says for a profile of the package with another amount of memory; no weights, no GPU. Half an
hour of a processor. Answers are kept by cell alone: begin a new file after a change of the planner.
Cells in which more SSDs, memory or tokens per second go the
wrong way are listed on stderr: they are faults of the planner.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from headrace.ask.answer import plan_model
from headrace.plan.clock.machine_profiles import load_profile
from headrace.terms.options.options import Options
from headrace.terms.sizes import GIB, format_seconds

TB = 10**12
GPU = "rtx4090"
SEQUENCE_LENGTH = 2048
# Allowed of the card: one without a screen has most of a GiB less than its name says.
CARD_GIB, DEVICE_GIB = 24, 23
RAM_GIB, SSDS = (64, 128, 256), (1, 4, 12)
# Of main memory, as a run would be told: the rest is the system's.
HOST_SHARE = 7 / 8
STEPS = 1000
# Below this a difference is a choice between plans that are alike.
ODD = 1.02

LLAMA_70B = LlamaConfig(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)
# `gelu_new`, GPT-2's default, is a chain of elementwise operators in transformers, each of which saves a tensor of four hidden
# sizes per token for backward, eight in all; `gelu_pytorch_tanh` is the same function in one kernel that saves its input.
GPT3_175B = GPT2Config(
    n_embd=12288, n_layer=96, n_head=96, vocab_size=50257, n_positions=2048, activation_function="gelu_pytorch_tanh"
)


@dataclass(frozen=True)
class Cell:
    """One question: a model on the GPU of the profile, or the same with other memory."""

    ram_gib: int
    ssds: int
    tokens: int

    @property
    def words(self) -> str:
        return f"{self.ram_gib} GiB, {self.ssds} SSD{'s' if self.ssds > 1 else ''}, {self.tokens} tokens"


@dataclass(frozen=True)
class Section:
    """A heading, what is special about it, and its cells."""

    title: str
    config: PretrainedConfig
    remark: str
    cells: tuple[Cell, ...]


Answer = dict[str, Any]


def grid(tokens_per_step: Sequence[int]) -> tuple[Cell, ...]:
    """Return all cells of memory, SSDs and tokens."""
    return tuple(Cell(ram, ssds, tokens) for tokens, ram, ssds in product(tokens_per_step, RAM_GIB, SSDS))


def tokens_of(cells: Iterable[Cell]) -> list[int]:
    """Return the tokens per step that there are, the fewest first."""
    return sorted({cell.tokens for cell in cells})


SECTIONS = (
    Section("Llama-3-70B on an RTX 4090", LLAMA_70B, "", grid((16384, 65536))),
    Section(
        "GPT-3 175B on an RTX 4090",
        GPT3_175B,
        "GPT-2's architecture: `n_embd` 12288, 96 layers, 96 heads. `activation_function` is `gelu_pytorch_tanh`: "
        "`gelu_new` is the same function, but saves eight tensors of four hidden sizes per token.",
        grid((16384, 65536)),
    ),
)


def answer(config: Path, cell: Cell) -> Answer:
    """Return what `headrace plan --json` says."""
    machine = replace(
        load_profile(f"{GPU}-{cell.ssds}ssd"),
        host_memory_bytes=cell.ram_gib * GIB,
        device_memory_bytes=CARD_GIB * GIB,
    )
    report = plan_model(
        config,
        Options(
            device_memory=DEVICE_GIB * GIB,
            host_memory=int(cell.ram_gib * HOST_SHARE * GIB),
            machine=machine,
            tokens_per_step=cell.tokens,
            sequence_length=SEQUENCE_LENGTH,
            max_steps=STEPS,
        ),
        here=False,
    )
    return report.to_json()


def answers_of(section: Section, folder: Path, kept: Path | None = None) -> list[tuple[Cell, Answer]]:
    """Return the answers of a section's cells; those in the file `kept` are not asked again, and others are appended there."""
    config = Path(tempfile.mkdtemp(dir=folder))
    section.config.save_pretrained(config)
    lines = kept.read_text(encoding="utf-8").splitlines() if kept is not None and kept.exists() else []
    known = {(title, Cell(**cell)): got for title, cell, got in map(json.loads, lines)}
    answers = []
    for cell in section.cells:
        found = known.get((section.title, cell)) or answer(config, cell)
        answers.append((cell, found))
        if kept is not None and (section.title, cell) not in known:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps([section.title, vars(cell), found]) + "\n")
        took = f"{found['step_seconds']:.0f} s a step" if found["fits"] else "does not fit"
        print(f"{section.title}: {cell.words}: {took}", file=sys.stderr, flush=True)
    return answers


def limit_of(found: Answer) -> tuple[str, float]:
    """Return what limits a step, and for which share of it that is busy."""
    match = re.search(r"(?:limited by|the most is) (.+?)(?:: busy| with) (\d+)%", found["bottleneck"])
    if match is None:
        lane = found["bottleneck_lane"]
        return lane, found["utilisation"][lane]
    words = match[1].replace(", which share the drives", "").replace(", which share the link", "")
    return words, int(match[2]) / 100


def tables_of(answers: Sequence[tuple[Cell, Answer]]) -> Iterator[str]:
    """Yield the lines of the tables: for each number of tokens the time of a step, then what SSDs and the device hold."""
    found = {(cell.tokens, cell.ram_gib, cell.ssds): got for cell, got in answers}
    rams, ssds = (sorted({key[place] for key in found}) for place in (1, 2))
    for tokens in tokens_of(cell for cell, _ in answers):
        yield f"**{tokens} tokens a step**: time of a step, tokens/s, the busiest part."
        yield ""
        yield from _table(["main memory", *map(_drives, ssds)])
        for ram in rams:
            yield _row([f"{ram} GiB", *(cell_words(found[tokens, ram, count]) for count in ssds)])
        yield ""
    yield from _table(["SSDs", "device memory", "SSD space", "written a step", f"worn by {STEPS} steps", "over the bound"])
    for count in ssds:
        fitting = [got for key, got in found.items() if key[2] == count and got["fits"]]
        yield _row([_drives(count), *(ranges_of(fitting) if fitting else ["does not fit", *[""] * 4])])


def cell_words(found: Answer) -> str:
    """Return a cell: how long a step takes, or what is missing."""
    if not found["fits"]:
        lacking = ", ".join(f"{size / GIB:.0f} GiB of {tier}" for tier, size in found["peak_bytes"].items())
        return f"does not fit: needs {lacking}"
    return f"{format_seconds(found['step_seconds'])}, {found['tokens_per_second']:.0f}, {limit_of(found)[0]}"


def ranges_of(answers: Sequence[Answer]) -> list[str]:
    """Return the least and the most of these answers: device, SSD space, bytes written, wear, and time over the bound."""
    return [
        _range([got["peak_bytes"]["device"] / GIB for got in answers], "{:.1f}", " GiB"),
        _range([got["peak_bytes"]["ssd"] / TB for got in answers], "{:.1f}", " TB"),
        _range([got["ssd_bytes_written_per_step"] / TB for got in answers], "{:.2f}", " TB"),
        _range([got["share_of_endurance"] for got in answers], "{:.1%}", ""),
        _range([got["step_seconds"] / got["lower_bound_seconds"] for got in answers], "{:.2f}", ""),
    ]


def _range(values: Sequence[float], form: str, unit: str) -> str:
    least, most = form.format(min(values)), form.format(max(values))
    return f"{least}{unit}" if least == most else f"{least} to {most}{unit}"


def _table(heads: Sequence[str]) -> Iterator[str]:
    yield _row(heads)
    yield "|" + "---|" * len(heads)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _drives(ssds: int) -> str:
    return f"{ssds} SSD{'s' if ssds > 1 else ''}"


def odd_cells(answers: Sequence[tuple[Cell, Answer]]) -> list[str]:
    """Return where more memory, SSDs or tokens make a step slower, or something no longer fit: that is the planner's fault."""
    found = dict(answers)
    odd = []
    for cell, own in found.items():
        for name, values in (("ram_gib", RAM_GIB), ("ssds", SSDS)):
            more = [replace(cell, **{name: value}) for value in values if value > getattr(cell, name)]
            for other in more:
                theirs = found.get(other)
                if theirs is None or not own["fits"]:
                    continue
                if not theirs["fits"]:
                    odd.append(f"{cell.words} fits, {other.words} does not")
                elif theirs["step_seconds"] > ODD * own["step_seconds"]:
                    odd.append(
                        f"{cell.words}: {own['step_seconds']:.1f} s a step; {other.words}: {theirs['step_seconds']:.1f} s"
                    )
        for other in (replace(cell, tokens=tokens) for tokens in tokens_of(found) if tokens > cell.tokens):
            theirs = found.get(other)
            if theirs is None or not own["fits"] or not theirs["fits"]:
                continue
            rates = own["tokens_per_second"], theirs["tokens_per_second"]
            if rates[1] * ODD < rates[0]:
                odd.append(f"{cell.words}: {rates[0]:.1f} tokens/s; {other.words}: {rates[1]:.1f}")
    return odd


PREFACE = f"""# What would it take: 70 and 175 billion parameters on one GPU?

Plans, not measurements: what `headrace plan` answers for the packaged profile `{GPU}` with other amounts of memory.
Full fine-tuning in bfloat16 with exact AdamW and clipping; every step is a checkpoint; rows have {SEQUENCE_LENGTH} tokens.

- A server with PCIe 4 and DDR4; {HOST_SHARE:.1%} of main memory may be used, and {DEVICE_GIB} GiB of the card's {CARD_GIB}.
- SSDs of 3.84 TB, 6.25 GB/s read and 3.2 GB/s written each. Sources of all figures: `headrace/plan/machines/{GPU}.json`.
- "Worn" is the share of a drive's rated life; "the bound" is the time that nothing with these rates can beat.

Made by `python bench/plans.py --output docs/log/plans.md`.
"""


def page_of(sections: Sequence[tuple[Section, list[tuple[Cell, Answer]]]]) -> str:
    """Return the page."""
    parts = [PREFACE]
    for section, answers in sections:
        parameters = answers[0][1]["parameters"]
        parts.append(f"## {section.title}\n\n{parameters / 1e9:.1f} billion parameters. {section.remark}".rstrip() + "\n")
        parts.append("\n".join(tables_of(answers)) + "\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the page here instead of printing it")
    parser.add_argument("--json", type=Path, help="write all answers here besides")
    parser.add_argument("--kept", type=Path, help="take answers from this file, and append others to it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [(section, answers_of(section, Path(folder), arguments.kept)) for section in SECTIONS]
    page = page_of(found)
    if arguments.json is not None:
        values = [{"section": section.title, "cell": vars(cell), **got} for section, got_all in found for cell, got in got_all]
        arguments.json.write_text(json.dumps(values, indent=1), encoding="utf-8")
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(page, encoding="utf-8")
    for section, answers in found:
        for line in odd_cells(answers):
            print(f"odd: {section.title}: {line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
