"""What `headrace plan` answers for 70 and 175 billion parameters, over main memory, SSDs and tokens per step: `docs/plans.md`.

    python bench/plans.py                             # print
    python bench/plans.py --output docs/plans.md      # write

Each cell is what `headrace plan` says for a profile of the package with another amount of memory; no weights, no GPU. Minutes.
The sentences between the tables are made from the same numbers. Cells in which more SSDs, memory or tokens per second go the
wrong way are listed on stderr: they are faults of the planner.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from headrace.ask.answer import plan_model
from headrace.plan.machine_profiles import load_profile
from headrace.terms.options import Options
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
    Section("Llama-3-70B on an RTX 4090", LLAMA_70B, "23 GiB of the card's 24 are allowed.", grid((16384, 65536))),
    Section(
        "GPT-3 175B on an RTX 4090",
        GPT3_175B,
        "GPT-2's architecture with `n_embd` 12288, 96 layers and 96 heads, and `activation_function` `gelu_pytorch_tanh` "
        "instead of `gelu_new`: the same function, but `gelu_new` is a chain of operators that save eight tensors of four "
        "hidden sizes per token for backward, which the device has to hold. 23 GiB of the card's 24 are allowed.",
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


def answers_of(section: Section, folder: Path) -> list[tuple[Cell, Answer]]:
    """Return the answers of a section's cells."""
    config = Path(tempfile.mkdtemp(dir=folder))
    section.config.save_pretrained(config)
    answers = []
    for cell in section.cells:
        answers.append((cell, answer(config, cell)))
        found = answers[-1][1]
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


HEADER = (
    "| RAM GiB | SSDs | tokens a step | sequences | s a step | unclipped | at best | tokens/s | busiest | device, host GiB "
    "| SSD TB | read, written TB a step | wear of 1000 steps | the plan |"
)


def row_of(cell: Cell, found: Answer) -> str:
    """Return a line of the table."""
    head = f"| {cell.ram_gib} | {cell.ssds} | {cell.tokens} | {SEQUENCE_LENGTH} |"
    if not found["fits"]:
        lacking = ", ".join(f"{tier} needs {size / GIB:.1f} GiB" for tier, size in found["peak_bytes"].items())
        nearest = found["alternatives"][:1]
        instead = f"; nearest: {nearest[0]['change']}, {format_seconds(nearest[0]['step_seconds'])} a step" if nearest else ""
        return f"{head} does not fit: {lacking}{instead} |" + " |" * 9
    limit, share = limit_of(found)
    peaks = found["peak_bytes"]
    return (
        f"{head} {found['step_seconds']:.0f} | {unclipped_seconds(found):.0f} "
        f"| {found['lower_bound_seconds']:.0f} | {found['tokens_per_second']:.0f} "
        f"| {limit} {share:.0%} | {peaks['device'] / GIB:.1f}, {peaks['host'] / GIB:.0f} | {peaks['ssd'] / TB:.2f} "
        f"| {found['ssd_bytes_read_per_step'] / TB:.2f}, {found['ssd_bytes_written_per_step'] / TB:.2f} "
        f"| {found['share_of_endurance']:.1%} | {plan_words(found['plan'])} |"
    )


def unclipped_seconds(found: Answer) -> float:
    """Return the seconds of a step while no gradient is clipped, and updates need not wait for the norm."""
    speculation = found.get("plan", {}).get("results", {}).get("speculation")
    return min(found["step_seconds"], speculation["hit_seconds"]) if speculation else found["step_seconds"]


def plan_words(plan: Answer) -> str:
    """Return the choices of a plan that differ from cell to cell."""
    blocks, kept = plan["num_blocks"], sum(len(each) for each in plan["kept"])
    homes = [f"{plan['stash_tiers'].count(tier)} {tier}" for tier in ("device", "host", "ssd") if tier in plan["stash_tiers"]]
    words = [f"weights of {min(plan['host_slots'], blocks)} of {blocks} blocks in memory"]
    if plan["resident_states"]:
        words.append(f"states of {len(plan['resident_states'])}")
    words.append(f"inputs {', '.join(homes)}")
    words.append(f"{plan['num_micro_batches']} x {plan['micro_batch_sequences']} rows")
    if plan["update_policy"] == "deferred":
        words.append(f"gradients held on {plan['held_gradients']}")
    if kept:
        words.append(f"{kept} outputs kept")
    return "; ".join(words)


def sentences(answers: Sequence[tuple[Cell, Answer]]) -> Iterator[str]:
    """Yield what the numbers of a table say: what limits where, and what more of each resource buys."""
    fitting = {(cell.tokens, cell.ram_gib, cell.ssds): found for cell, found in answers if found["fits"]}
    seconds = {key: found["step_seconds"] for key, found in fitting.items()}
    all_tokens = tokens_of(cell for cell, _ in answers)
    fewest, most = all_tokens[0], all_tokens[-1]
    yield from _missing(answers)
    for tokens in all_tokens:
        own = {key[1:]: found for key, found in fitting.items() if key[0] == tokens}
        if not own:
            continue
        limits: dict[str, list[tuple[int, int]]] = {}
        for place, found in own.items():
            limits.setdefault(limit_of(found)[0], []).append(place)
        where = "; ".join(
            f"{words} {'in all cells' if len(places) == len(own) else 'with ' + _places(places)}"
            for words, places in limits.items()
        )
        best, worst = min(own, key=lambda key: own[key]["step_seconds"]), max(own, key=lambda key: own[key]["step_seconds"])
        yield (
            f"At {tokens} tokens a step it takes from {format_seconds(own[best]['step_seconds'])} ({_place(best)}) to "
            f"{format_seconds(own[worst]['step_seconds'])} ({_place(worst)}). The busiest part: {where}."
        )
        yield from (text for text in (_gain(own, 1), _gain(own, 0)) if text)
    more = [seconds[most, ram, ssds] / seconds[fewest, ram, ssds] for ram, ssds in _both(fitting, fewest, most)]
    if more:
        factor = most // fewest
        yield (
            f"{factor} times the tokens cost {min(more):.1f} to {max(more):.1f} times the seconds, "
            f"so that tokens per second rise {factor / max(more):.1f} to {factor / min(more):.1f} times."
        )
    if fitting:
        waits = [found["step_seconds"] / found["lower_bound_seconds"] for found in fitting.values()]
        unclipped = [unclipped_seconds(found) / found["lower_bound_seconds"] for found in fitting.values()]
        yield f"Steps take {min(waits):.2f} to {max(waits):.2f} times what is possible at best: the rest is waiting."
        # Not the same bytes: updates that do not wait for the norm hold no gradients.
        yield f"Unclipped, they take {min(unclipped):.2f} to {max(unclipped):.2f} times what clipped ones take at best."
        written = [found["ssd_bytes_written_per_step"] for found in fitting.values()]
        worn = {key[2]: max(found["share_of_endurance"] for k, found in fitting.items() if k[2] == key[2]) for key in fitting}
        wear = ", ".join(f"{share:.0%} of the rated life of {_drives(ssds)}" for ssds, share in sorted(worn.items()))
        yield f"A step writes {min(written) / TB:.2f} to {max(written) / TB:.2f} TB; {STEPS} steps use at most {wear}."


def _missing(answers: Sequence[tuple[Cell, Answer]]) -> Iterator[str]:
    """Say how many cells lack what, by tokens and tier."""
    lacking: dict[tuple[int, str], list[int]] = {}
    for cell, found in answers:
        if not found["fits"]:
            for tier, size in found["peak_bytes"].items():
                lacking.setdefault((cell.tokens, tier), []).append(size)
    for (tokens, tier), sizes in lacking.items():
        of = sum(cell.tokens == tokens for cell, _ in answers)
        space = "SSD space" if tier == "ssd" else f"{tier} memory"
        yield (
            f"At {tokens} tokens a step {len(sizes)} of {of} cells do not fit for lack of {space}: "
            f"at least {min(sizes) / GIB:.1f} GiB are needed."
        )


def _both(fitting: dict[tuple[int, int, int], Answer], fewest: int, most: int) -> list[tuple[int, int]]:
    return [key[1:] for key in fitting if key[0] == fewest and (most, *key[1:]) in fitting]


def _gain(own: dict[tuple[int, int], Answer], axis: int) -> str:
    """Say how much faster steps get with more SSDs (axis 1) or more memory (axis 0), at each amount of the other."""
    subject, unit = (("More main memory", "GiB"), ("Having more SSDs", "SSDs"))[axis]
    gains = []
    for other in sorted({place[1 - axis] for place in own}):
        line = sorted((place[axis], found["step_seconds"]) for place, found in own.items() if place[1 - axis] == other)
        if len(line) > 1:
            steps = ", ".join(f"{before / after:.2f}" for (_, before), (_, after) in pairwise(line))
            beside = f"{other} GiB" if axis else _drives(other)
            gains.append(f"{steps} times with {beside}")
    amounts = sorted({place[axis] for place in own})
    if not gains:
        return ""
    row = ", ".join(map(str, amounts))
    return f"{subject} ({row} {unit}) makes a step faster, each amount over the one before, {'; '.join(gains)}."


def _places(places: Sequence[tuple[int, int]]) -> str:
    by_ssds: dict[int, list[int]] = {}
    for ram, ssds in places:
        by_ssds.setdefault(ssds, []).append(ram)
    return " and ".join(f"{_drives(ssds)} ({', '.join(map(str, rams))} GiB)" for ssds, rams in sorted(by_ssds.items()))


def _place(place: tuple[int, int]) -> str:
    return f"{place[0]} GiB, {_drives(place[1])}"


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


PREFACE = f"""# What it would take: 70 and 175 billion parameters on one GPU

Answers of `headrace plan` for the packaged profile `{GPU}` with other amounts of memory: a server with PCIe 4, DDR4 and
data-centre SSDs of 3.84 TB, 6.25 GB/s read and 3.2 GB/s written each; every figure with its source in
`headrace/plan/machines/{GPU}.json`. They are plans: computed from shapes and declared rates, not measured. Full fine-tuning in
bfloat16 with exact AdamW and gradient clipping, every step a checkpoint; {HOST_SHARE:.1%} of main memory may be used.
"Unclipped" are the seconds while no gradient is clipped, so that updates need not wait for the norm (docs/decisions/0007); "at
best" is what no machine with these rates can beat while updates wait; "wear" is the share of the rated life of the drive that
wears out first.

Made by `python bench/plans.py --output docs/plans.md`.
"""


def page_of(sections: Sequence[tuple[Section, list[tuple[Cell, Answer]]]]) -> str:
    """Return the page."""
    parts = [PREFACE]
    for section, answers in sections:
        parameters = answers[0][1]["parameters"]
        table = [HEADER, "|" + "---|" * (HEADER.count("|") - 1), *(row_of(cell, found) for cell, found in answers)]
        parts.append(f"## {section.title}\n\n{parameters / 1e9:.1f} billion parameters. {section.remark}\n")
        parts.append("\n".join(table) + "\n")
        if len(answers) > len(RAM_GIB):
            parts.append(" ".join(sentences(answers)) + "\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the page here instead of printing it")
    parser.add_argument("--json", type=Path, help="write all answers here besides")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [(section, answers_of(section, Path(folder))) for section in SECTIONS]
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
