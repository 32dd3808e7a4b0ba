"""Five ways through a registered architecture, each beside stock transformers (and peft): equal, refused in one line, or wrong.

A way returns "equal", "refused: WHY" or "WRONG: WHAT"; what stock transformers itself cannot do is "stock fails: WHY".
"""

import copy
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from headrace import Engine, GenerateOptions, Generator, Options
from headrace.compress.decompression import decompress_model
from headrace.compress.run import compress_model
from headrace.generate.passes.opened import GenerationModel
from headrace.generate.uses.evaluator import Evaluator
from headrace.model import IGNORED, self_check
from headrace.model.directory.checkpoint import read_config
from headrace.model.trials.instance import tiny_model
from headrace.model.trials.thresholds import tiny_of
from headrace.terms.errors import HeadraceError
from headrace.terms.options.budget import Budget
from headrace.terms.options.compress_options import CompressOptions

LENGTHS = (13, 10)
ROW = sum(LENGTHS)
NEW_TOKENS = 5
Way = Callable[[Any, Path, Path], str]


class StockFails(Exception):
    """Stock transformers cannot do it."""


def without_dropout(config: Any) -> Any:
    """Set every rate of dropout to zero, in parts too: draws would differ."""
    for part in (config, getattr(config, "text_config", None)):
        for name, value in vars(part).items() if part is not None else ():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config


def config_of(kind: str, folder: Path) -> Any:
    """Return the default configuration of a registered kind. Where its class refuses that, it is refused as a file that says no
    more.
    """
    try:
        config = without_dropout(CONFIG_MAPPING[kind]())
    except Exception:  # whatever its own rules raise
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        config = without_dropout(read_config(folder))
    if hasattr(config, "is_decoder") and not getattr(config, "is_encoder_decoder", False):
        config.is_decoder = True  # of a BERT-like model only its decoder is causal
    return config


def saved_model(config: Any, folder: Path) -> Any:
    """Save a tiny instance of a configuration's architecture into `folder`; return it, in evaluation."""
    model = tiny_model(type(config), tiny_of(config).key).eval()
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    return model


def ids_of(model: Any, rows: int, length: int, seed: int = 1) -> torch.Tensor:
    high = model.get_input_embeddings().weight.shape[0]
    return torch.randint(2, high, (rows, length), generator=torch.Generator().manual_seed(seed))


def packed_batch(model: Any) -> dict[str, torch.Tensor]:
    """Two rows of two samples each; the first token of a sample has no label."""
    ids = ids_of(model, 2, ROW)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).expand(2, ROW)
    labels = torch.where(positions == 0, IGNORED, ids)
    return {"input_ids": ids, "labels": labels, "position_ids": positions.contiguous()}


def by_samples(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Return loss and gradient norm of a packed batch, each sample run by itself through the stock model."""
    model.train()
    total, tokens = torch.zeros(()), 0
    for row in batch["input_ids"]:
        for ids in row.split(LENGTHS):
            logits = model(input_ids=ids[None], use_cache=False).logits[:, :-1].float()
            total = total + F.cross_entropy(logits.flatten(0, 1), ids[1:], reduction="sum")
            tokens += ids.numel() - 1
    (total / tokens).backward()  # type: ignore[no-untyped-call]
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    model.zero_grad()
    model.eval()
    return float(total.detach()) / tokens, float(norm)


def compared(found: float, want: float, what: str, tolerance: float = 2e-4) -> str:
    return "equal" if abs(found - want) <= tolerance * max(1.0, abs(want)) else f"WRONG: {what} {found:.6g} for {want:.6g}"


def train_packed(model: Any, path: Path, folder: Path) -> str:
    batch = packed_batch(model)
    want = stock(lambda: by_samples(model, batch))
    options = Options(
        host_memory="4GiB", tokens_per_step=2 * ROW, sequence_length=ROW, compute_dtype="float32", output=folder / "run"
    )
    with Engine.open(path, options) as engine:
        done = engine.step(batch)
    words = [compared(done.loss, want[0], "loss"), compared(done.grad_norm or 0.0, want[1], "norm", 1e-3)]
    return next((each for each in words if each != "equal"), "equal")


def evaluate(model: Any, path: Path, folder: Path) -> str:
    ids = ids_of(model, 2, 16)
    logits = stock(lambda: model(input_ids=ids, use_cache=False).logits[:, :-1].float())
    want = float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    opened = GenerationModel.of_directory(path, Budget(host="4GiB"), "float32", None, self_check)
    with Evaluator(opened, GenerateOptions(host_memory="4GiB"), 16) as evaluator:
        evaluator.prepare(2)
        ((rows, total),) = evaluator.losses([{"input_ids": ids, "labels": ids.clone()}])
    return compared(total / rows.scored_tokens, want, "loss")


def generate(model: Any, path: Path, folder: Path) -> str:
    ids = ids_of(model, 2, 12)
    how: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": []}
    want = stock(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how)[:, 12:].tolist())
    with Generator.open(path, Budget(host="4GiB"), compute_dtype="float32") as generator:
        found = dict(generator.generate(ids.tolist(), **how))
    rows = [list(found[row])[:NEW_TOKENS] for row in range(2)]
    return "equal" if rows == want else f"WRONG: tokens {rows[0]} for {want[0]}"


def lora(model: Any, path: Path, folder: Path) -> str:
    from peft import PeftModel

    ids = ids_of(model, 2, 16)
    batch = {"input_ids": ids, "labels": ids.clone()}
    options = Options(
        host_memory="4GiB",
        tokens_per_step=32,
        sequence_length=16,
        compute_dtype="float32",
        adapter="lora:rank=2",
        learning_rate=1e-2,
        output=folder / "run",
    )
    with Engine.open(path, options) as engine:
        for _ in range(2):
            engine.step(batch)
        found = engine.next_logits({"input_ids": ids})
        engine.save_pretrained(folder / "adapter")

    def with_peft() -> torch.Tensor:
        base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
        with torch.no_grad():
            logits: torch.Tensor = adapted(input_ids=ids, use_cache=False).logits[:, -1].float()
        return logits

    want = stock(with_peft)
    return compared(float((found - want).abs().max() / want.abs().max()), 0.0, "logits", 1e-3)


def int4(model: Any, path: Path, folder: Path) -> str:
    data, path = folder / "data.jsonl", folder / "model"
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(path)
    rows = ids_of(model, 24, 16, seed=3).tolist()
    data.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    values = {"model": path, "output": folder / "out", "data": str(data), "to": "int4", "group_size": 32, "sequence_length": 16}
    compress_model(CompressOptions.of({**values, "compute_dtype": "float32", "host_memory": "1GiB", "cache": folder / "cache"}))
    decompress_model(folder / "out", folder / "plain")
    ids = ids_of(model, 2, 9)

    def logits(place: Path) -> torch.Tensor:
        loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).eval()
        loaded.config._is_quantized = True  # Jamba's code adds in another order where a model is or was coded
        with torch.no_grad():
            found: torch.Tensor = loaded(input_ids=ids, use_cache=False).logits
        return found

    want = stock(lambda: logits(folder / "plain"))
    return "equal" if torch.equal(logits(folder / "out"), want) else "WRONG: stock's logits are others than those decoded here"


WAYS: dict[str, Way] = {"train": train_packed, "eval": evaluate, "generate": generate, "lora": lora, "int4": int4}


def stock(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except Exception as error:  # whatever the architecture's own code raises
        raise StockFails(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error


def outcomes_of(kind: str, folder: Path, ways: Collection[str] = tuple(WAYS)) -> dict[str, str]:
    """Return by way what comes out for a registered kind."""
    path = folder / "model"
    try:
        config = config_of(kind, path)
        self_check(config)
        model = saved_model(config, path)
    except HeadraceError as error:
        return dict.fromkeys(ways, f"refused: {_plain(str(error), folder)}")
    except Exception as error:  # a traceback is a fault
        return dict.fromkeys(ways, f"WRONG: {type(error).__name__}: {_plain(str(error), folder)}")
    found = {}
    for name, way in WAYS.items():
        if name not in ways:
            continue
        (folder / name).mkdir()
        try:
            found[name] = way(model, path, folder / name)
        except StockFails as error:
            found[name] = f"stock fails: {_plain(str(error), folder)}"
        except HeadraceError as error:
            found[name] = f"refused: {_plain(str(error), folder)}"
        except Exception as error:  # a traceback is a fault
            found[name] = f"WRONG: {type(error).__name__}: {_plain(str(error), folder)}"
    return found


def _plain(text: str, folder: Path) -> str:
    """Return the beginning of a text without what differs from run to run."""
    line = (text.splitlines() or [""])[0].replace(str(folder / "model"), "MODEL").replace(str(folder), "FOLDER")
    return re.sub(r"0x[0-9a-f]+", "0x", line)[:120]
