"""What four bits and ternary experts cost small mixtures that are trained here, by GPTQ and by plain rounding.

    python bench/quality.py --scratch DIRECTORY [--seconds 60] [--seeds 3] [--out quality.json]

Each seed trains a Mixtral of bytes (8 experts in 3 blocks) for so many CPU seconds on the Python library's own source, saves it
in bfloat16, and compresses it with `headrace compress`: the experts to ternary weights, and, with the first seed, all matrices
to four bits. Losses are stock transformers', of the model as it was, as it was decompressed, and with the same matrices rounded
to the same grid. Differences are of the same rows; the interval is of 95 percent, by the rows.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedTokenizerFast

from headrace.codec import Grid, Int4Grid, TernaryGrid, nearest
from headrace.compress.decompression import decompress_model
from headrace.compress.run import Compressed, compress_model
from headrace.terms.options.compress_options import CompressOptions

LENGTH, BATCH, GROUP = 128, 16, 64
HELD_OUT_TOKENS = {"int4": 200_000, "ternary": 50_000}
SIZES = {
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}


def library() -> str:
    """Return the source of the Python library, file after file, in the order of names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))


def tokenizer_of_bytes(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer with a token for each byte."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(vocab_size=257, special_tokens=["<eos>"], initial_alphabet=alphabet))
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<eos>")
    whole.save_pretrained(str(folder))
    return whole


def trained(folder: Path, ids: torch.Tensor, seconds: float, seed: int) -> Any:
    """Train for so many CPU seconds and save in bfloat16."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES), experts_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    begin = time.process_time()
    while (share := (time.process_time() - begin) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (0.1 + 0.9 * math.cos(math.pi / 2 * share) ** 2)
        rows = ids[torch.randint(len(ids), (BATCH,))]
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows, output_router_logits=True).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)


def row_losses(directory: Path, rows: torch.Tensor, round_to: Grid | None = None, experts_only: bool = False) -> torch.Tensor:
    """Return the mean loss of each row, with the matrices of blocks rounded to a grid where one is given."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            coded = parameter.dim() == 3 or (parameter.dim() == 2 and "self_attn" in name and not experts_only)
            if round_to is not None and coded and ".layers." in name:
                stack = parameter if parameter.dim() == 3 else parameter[None]
                parameter.copy_(nearest(stack, round_to).values.view(parameter.shape))
        found = []
        for some in rows.split(64):
            logits = model(input_ids=some).logits[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.mT, some[:, 1:], reduction="none")
            found.append(losses.mean(dim=1))
    return torch.cat(found)


def paired(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
    """Return the mean of second - first by rows, and half of its 95 percent interval."""
    difference = (second - first).double()
    return float(difference.mean()), 1.96 * float(difference.std()) / math.sqrt(len(difference))


def compressed(model: Path, to: str, data: Path, folder: Path) -> tuple[Compressed, Path]:
    """Compress and decompress."""
    more = {"experts_only": True} if to == "ternary" else {"group_size": GROUP}
    values = {"model": model, "output": folder / to, "data": str(data), "to": to, "sequence_length": LENGTH}
    values |= {"calibration_rows": 128, "held_out_rows": 4, "host_memory": "1GiB", "compute_dtype": "float32"}
    done = compress_model(CompressOptions.of(values | {"cache": folder / "cache"} | more))
    return done, decompress_model(folder / to, folder / f"{to}-plain")


def compared(model: Path, to: str, data: Path, rows: torch.Tensor, folder: Path) -> dict[str, Any]:
    """Return losses and errors of one code."""
    rows = rows[: -(-HELD_OUT_TOKENS[to] // (LENGTH - 1))]
    grid = TernaryGrid() if to == "ternary" else Int4Grid(group=GROUP)
    done, plain = compressed(model, to, data, folder)
    before = row_losses(model, rows)
    rounded, ours = row_losses(model, rows, grid, to == "ternary"), row_losses(plain, rows)
    errors = [(report.error, report.rounding_error) for report in done.reports]
    return {
        "tokens": rows.shape[0] * (LENGTH - 1),
        "loss": float(before.mean()),
        "rise": paired(before, ours),
        "rise of rounding": paired(before, rounded),
        "beyond rounding": paired(rounded, ours),
        "rounding's error over ours": sum(other for _, other in errors) / sum(own for own, _ in errors),
        "least of a matrix": min(other / own for own, other in errors),
        "zeros": sum(report.zeros for report in done.reports) / len(done.reports),
    }


def main() -> None:
    """Print a line for each seed and code, and write them as JSON where asked."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scratch", type=Path, required=True)
    arguments.add_argument("--seconds", type=float, default=60.0)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    text, found = library(), {}
    for seed in range(given.seeds):
        folder = given.scratch / f"quality-{seed}"
        model = folder / "model"
        tokenizer = tokenizer_of_bytes(model)
        ids = torch.tensor(tokenizer(text)["input_ids"])
        ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
        held_out = ids[:: max(1, len(ids) // 1600)][:1600]
        training = torch.ones(len(ids), dtype=torch.bool)
        training[:: max(1, len(ids) // 1600)] = False
        trained(model, ids[training], given.seconds, seed)
        data = folder / "data.jsonl"
        samples = ids[training][torch.randperm(int(training.sum()), generator=torch.Generator().manual_seed(seed))[:160]]
        data.write_text("\n".join(json.dumps({"input_ids": row.tolist()}) for row in samples) + "\n", encoding="utf-8")
        for to in ("ternary", "int4") if seed == 0 else ("ternary",):
            found[f"{to}, seed {seed}"] = compared(model, to, data, held_out, folder)
            print(f"{to}, seed {seed}: {json.dumps(found[f'{to}, seed {seed}'])}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
