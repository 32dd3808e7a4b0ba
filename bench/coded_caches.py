"""What keys and values in few bits cost a model, how many rows then fit into equal memory, and how fast a core decodes them.

Rows are paragraphs of Python's own documentation (`pydoc_data`). The first half of a row is a prompt, read in one pass; the
second half comes token by token, so that nearly all that is attended to is coded. Losses are of the second half.

    python bench/coded_caches.py --model MODEL [--rows 16] [--length 512] [--memory 1200MiB]
"""

import argparse
import json
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from headrace.codec.cache_codes import CACHE_CODES, CacheCode
from headrace.generate.passes.generator import Generator
from headrace.model.caches.tiered_cache import TieredLayer
from headrace.terms.options.budget import Budget
from headrace.terms.sizes import parse_bytes

WAYS: dict[str, CacheCode | None] = {"plain": None, **CACHE_CODES}
PROMPT, NEW = 1024, 256


class InMemory(TieredLayer):
    """A layer whose tokens always lie in memory of its own."""

    def __init__(self, code: CacheCode | None, num_bytes: int) -> None:
        super().__init__(code)
        self._memory = torch.empty(num_bytes, dtype=torch.uint8)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """See `TieredLayer`."""
        return self.taken(self._memory, key_states, value_states)


def row_losses(model: Any, ids: torch.Tensor, code: CacheCode | None) -> torch.Tensor:
    """Return the mean loss of each row's second half."""
    cache, (rows, length) = DynamicCache(config=model.config), ids.shape
    text = model.config.get_text_config()
    numbers = 2 * rows * length * text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
    cache.layers = [InMemory(code, 4 * numbers) for _ in range(text.num_hidden_layers)]
    half, losses = length // 2, []
    with torch.no_grad():
        for start, stop in [(0, half), *((place, place + 1) for place in range(half, length - 1))]:
            logits = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            losses.append(torch.nn.functional.cross_entropy(logits[:, -1].float(), ids[:, stop], reduction="none"))
    return torch.stack(losses).mean(dim=0)


def rows_that_fit(model: Path, memory: str, name: str | None) -> dict[str, Any]:
    """Return how many rows fit beside all weights: the plan's peak grows evenly with rows."""
    with Generator.open(model, Budget(host="20GiB"), cache_dtype=name, seats=1) as generator:
        few, more = (generator.plan_only(rows, PROMPT, NEW, rows=rows, prefill_chunk=512) for rows in (8, 16))
    each = (more.peak("host") - few.peak("host")) / 8
    return {"rows": int(8 + (parse_bytes(memory) - few.peak("host")) // each), "bytes_per_row": round(each)}


def decoding_rate(code: CacheCode, dtype: torch.dtype) -> float:
    """Return how many numbers a second are decoded by as many cores as torch uses."""
    numbers = torch.randn(8, 4, 1024, 64).to(dtype)
    coded = torch.empty(1024, 8 * code.coded_bytes(256), dtype=torch.uint8)
    code.encode(numbers, coded)
    code.decode(coded, numbers)
    seconds = []
    for _ in range(20):
        begin = time.perf_counter()
        code.decode(coded, numbers)
        seconds.append(time.perf_counter() - begin)
    return numbers.numel() / sorted(seconds)[10]


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--memory", default="1200MiB")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    tokens = tokenizer("\n\n".join(topics.values()), return_tensors="pt").input_ids[0]
    ids = tokens[: given.rows * given.length].view(given.rows, given.length)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.bfloat16).eval()
    found: dict[str, Any] = {}
    plain = torch.zeros(given.rows)
    for name, code in WAYS.items():
        losses = row_losses(model, ids, code)
        plain = losses if code is None else plain
        off = losses - plain
        found[name] = {"loss": float(losses.mean()), "more": float(off.mean()), "error": float(off.std() / given.rows**0.5)}
        if code is not None:
            for dtype in (torch.bfloat16, torch.float32):
                found[name][f"decoded_per_second_{str(dtype).removeprefix('torch.')}"] = decoding_rate(code, dtype)
        print(name, json.dumps(found[name]), flush=True)
    del model
    for name, code in WAYS.items():
        found[name] |= rows_that_fit(given.model, given.memory, None if code is None else name)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
