"""Run all registered causal models through all ways and compare with the table.

Run: python tests/architectures/table.py [--renew] [--missing] [KIND...]
"""

import argparse
import json
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("outcomes.json")


def outcome(asked: tuple[str, tuple[str, ...]]) -> tuple[str, dict[str, str]]:
    """Return a kind, and what comes out for it by way."""
    import torch
    from transformers.utils import logging
    from ways import outcomes_of

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        return asked[0], outcomes_of(asked[0], Path(folder), asked[1])


def write(table: dict[str, Any], found: dict[str, dict[str, str]]) -> None:
    """Write the table with what was found so far."""
    import transformers

    whole = table | {"outcomes": dict(sorted((table["outcomes"] | found).items())), "transformers": transformers.__version__}
    FILE.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Print what differs from the table; exit code 1 where something does, or is wrong."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--renew", action="store_true", help="write the table")
    parser.add_argument("--missing", action="store_true", help="only kinds without a row")
    parser.add_argument("--way", action="append", help="only this way; may be given several times")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    table = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"outcomes": {}}
    before, found = table["outcomes"], {}
    ways = tuple(asked.way or ("train", "eval", "generate", "lora", "int4"))
    kinds = [(kind, ways) for kind in asked.kinds if not asked.missing or kind not in before]
    with get_context("spawn").Pool(asked.workers, maxtasksperchild=8) as pool:
        for kind, row in pool.imap_unordered(outcome, kinds):
            found[kind] = before.get(kind, {}) | row
            if asked.renew:
                write(table, found)
            for way, text in row.items():
                if text != before.get(kind, {}).get(way) or text.startswith("WRONG"):
                    print(f"{kind} {way}: {text}", flush=True)
    words = [text.split(":")[0] for row in found.values() for text in row.values()]
    print(", ".join(f"{words.count(word)} {word}" for word in sorted(set(words))))
    if not asked.renew and any(row != before.get(kind) for kind, row in found.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
