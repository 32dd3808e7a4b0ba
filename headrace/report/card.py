"""The model card (`README.md`) of a finished run: what was trained, on what, how.

Invariant: it states only what the run's own records say; nothing about quality or use is invented.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.report.metrics import Record, best_of
from headrace.terms.options.optimizer import ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card needs: names for people (no paths), versions, the resolved options, the step records; notes on the files."""

    name: str
    base_model: str
    data: tuple[str, ...]
    versions: Mapping[str, str]
    options: Mapping[str, Any]
    records: Sequence[Record]
    notes: Sequence[str] = ()
    evaluations: Sequence[Record] = ()


def model_card(facts: CardFacts) -> str:
    """Return the card as Markdown with the metadata block that the Hugging Face Hub reads."""
    metadata = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    # The Hub accepts only `owner/name` here; a folder on somebody's machine means nothing to it.
    if facts.base_model.count("/") == 1:
        metadata.append(f"base_model: {facts.base_model}")
    metadata += ["tags:", "- headrace", "---", ""]
    data = ", ".join(f"`{name}`" for name in facts.data)
    sections = [
        f"# {facts.name}",
        "",
        f"Fine-tuned from `{facts.base_model}` on {data} with Headrace: {_trained(facts.options)}, with an fp32 master, by "
        f"the rule `{facts.options['optimizer']}`.",
        "",
        *(f"Note: {note}.\n" for note in facts.notes),
        *_results(facts.records, facts.evaluations),
        "## Training options",
        "",
        "| option | value |",
        "|---|---|",
        *(f"| {name} | {json.dumps(value)} |" for name, value in facts.options.items()),
        "",
        "## Versions",
        "",
        *(f"- {name} {version}" for name, version in facts.versions.items()),
        "",
    ]
    return "\n".join(metadata + sections)


def _trained(options: Mapping[str, Any]) -> str:
    """Return what was trained, in words."""
    if options.get("adapter"):
        return f"adapters (`{options['adapter']}`) beside frozen weights"
    what = "every parameter" if options["train"] == ALL else "the matrices of blocks"
    return (
        what
        if options["gradient"].partition(":")[0] in ("dense", "rows")
        else f"{what}, in what `{options['gradient']}` keeps of gradients"
    )


def _results(records: Sequence[Record], evaluations: Sequence[Record]) -> list[str]:
    if not records:
        return []
    best = best_of(evaluations)
    held_out = []
    if best is not None:
        newest = evaluations[-1]
        lowest = f"{best['eval_loss']:.4f} after step {best['step']}, the lowest"
        last_one = "" if newest is best else f"; {newest['eval_loss']} after step {newest['step']}, the last"
        held_out = [f"- loss of held-out data ({best['eval_tokens']} tokens): {lowest}{last_one}"]
    first, last = records[0], records[-1]
    skipped = sum("skipped" in record for record in records)
    return [
        "## Result",
        "",
        f"- steps: {last['step']}" + (f" ({skipped} skipped)" if skipped else ""),
        f"- tokens: {sum(record['tokens'] for record in records)}",
        f"- training loss: {first['loss']} in the first step, {last['loss']} in the last",
        *held_out,
        "",
    ]
