"""The numbers of TRL's trainers on a tiny model: loss, rewards and gradients of a batch of pairs, in trl_numbers.json.

    make test-trl    # in an environment of its own, with TRL; `make test` compares with what was written

Each case is a trainer of TRL as it stands, its own collator, and a policy and a reference with other weights.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STORED = Path(__file__).parent / "trl_numbers.json"
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]
PAIRS = [
    {"prompt": "w1 w2 w3", "chosen": " w4 w5 w6 w7", "rejected": " w8 w9"},
    {"prompt": "w10 w11", "chosen": " w12", "rejected": " w13 w14 w15 w16 w17"},
    {"prompt": "w20 w21 w22 w23", "chosen": " w24 w25", "rejected": " w25 w24"},
]
# The same texts, each by itself: those of the second half are not desirable. Of all, KL is below 0; of the first four above.
LABELLED = [
    {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
    for side in ("chosen", "rejected")
    for pair in PAIRS
]
# By our words: TRL's trainer, and what its configuration is given.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"beta": 0.1}),
    "dpo:beta=0.3,loss_type=hinge": ("dpo", {"beta": 0.3, "loss_type": ["hinge"]}),
    "dpo:beta=0.2,loss_type=ipo": ("dpo", {"beta": 0.2, "loss_type": ["ipo"]}),
    "orpo:beta=0.2": ("orpo", {"beta": 0.2}),
    "kto": ("kto", {"beta": 0.1}),
    "kto:beta=0.2,desirable_weight=1.5,undesirable_weight=0.5": (
        "kto",
        {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    "grpo:num_generations=4,max_completion_length=24": ("grpo", {}),
    "grpo:num_generations=4,max_completion_length=24,loss_type=grpo,scale_rewards=batch": (
        "grpo",
        {"loss_type": "grpo", "scale_rewards": "batch"},
    ),
    "grpo:num_generations=4,max_completion_length=24,loss_type=dr_grpo,scale_rewards=none": (
        "grpo",
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "simpo:beta=2,gamma=0.5": ("cpo", {"beta": 2.0, "loss_type": "simpo", "simpo_gamma": 0.5, "cpo_alpha": 0.0}),
}


def tiny(seed: int) -> LlamaForCausalLM:
    """Return a tiny model in float32 with weights of a seed."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, **sizes, initializer_range=0.3, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    return LlamaForCausalLM(config).float().eval()


def _tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def _trainer(kind: str, folder: str, values: dict[str, Any]) -> Any:
    from datasets import Dataset

    data = (LABELLED[:4] if "desirable_weight" in values else LABELLED) if kind == "kto" else PAIRS
    common = {"output_dir": folder, "report_to": [], "max_length": 32, "per_device_train_batch_size": len(data)}
    common |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    given: dict[str, Any] = {"model": tiny(0), "processing_class": _tokenizer(), "train_dataset": Dataset.from_list(data)}
    if kind == "dpo":
        from trl import DPOConfig, DPOTrainer

        return DPOTrainer(ref_model=tiny(1), args=DPOConfig(**common, **values), **given)
    if kind == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOTrainer(ref_model=tiny(1), args=KTOConfig(**common, **values), **given)
    if kind == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(args=ORPOConfig(**common, **values), **given)
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer(args=CPOConfig(**common, **values), **given)


def _rows(kind: str, batch: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's rows as ours: chosen and rejected alternate, or completions and others'."""
    if kind == "dpo":
        ids, attended, trained = batch["input_ids"], batch["attention_mask"], batch["completion_mask"].bool()
        halves = [part.chunk(2) for part in (ids, attended, trained)]
        parts = [[each[half] for each in halves] for half in (0, 1)]
    elif kind == "kto":
        names = ("input_ids", "attention_mask", "completion_mask")
        parts = [[batch[f"{prefix}{name}"] for name in names] for prefix in ("", "KL_")]
    else:
        parts = [
            [batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], batch[f"{side}_labels"] != -100]
            for side in ("chosen", "rejected")
        ]
    rows = [row for pair in zip(*(zip(*part, strict=True) for part in parts), strict=True) for row in pair]
    found = []
    for ids, attended, trained in rows:
        length = int(attended.sum())
        found.append({"input_ids": ids[:length].tolist(), "trained": trained[:length].int().tolist()})
    labels = {"desirable": batch["label"].int().repeat_interleave(2).tolist()} if kind == "kto" else {}
    return {"rows": found, **labels}


def _of_rewards(values: dict[str, Any]) -> dict[str, Any]:
    """Return what TRL makes of completions that it samples itself, and of rewards that are fixed."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rewards = [0.5, 2.0, -1.0, 0.25, 3.0, 3.0, 3.0, 2.5]
    prompts = [{"prompt": pair["prompt"]} for pair in PAIRS[:2] for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        common = {"output_dir": folder, "report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
        sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24, "beta": 0.0}
        trainer = GRPOTrainer(
            model=tiny(0),
            reward_funcs=lambda completions, **others: rewards,
            args=GRPOConfig(**common, **sizes, **values),
            processing_class=_tokenizer(),
            train_dataset=Dataset.from_list(prompts),
        )
        torch.manual_seed(5)
        made = trainer._generate_and_score_completions(prompts)
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, made)
        loss.backward()
        norms = {name: float(each.grad.norm()) for name, each in trainer.model.named_parameters() if each.grad is not None}
        told = trainer._metrics["eval"]
        names = ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length")
        figures = {name: float(told[name][-1]) for name in names}
    rows = []
    for ids, seen, new, counted in zip(
        *(made[f"{a}_{b}"] for a in ("prompt", "completion") for b in ("ids", "mask")), strict=True
    ):
        start, length = ids[seen.bool()].tolist(), int(counted.sum())
        rows.append({"input_ids": start + new[:length].tolist(), "trained": [0] * len(start) + [1] * length})
    return {"loss": float(loss), "metrics": figures, "gradient_norms": norms, "rows": rows, "rewards": rewards}


def numbers(text: str) -> dict[str, Any]:
    """Return the rows of a case, TRL's loss and figures, and the norm of each gradient."""
    kind, values = CASES[text]
    if kind == "grpo":
        return _of_rewards(values)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(kind, folder, values)
        trainer.model.eval()
        batch = next(iter(trainer.get_train_dataloader()))
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        told = getattr(trainer, "_stored_metrics", None) or trainer._metrics
        figures = {name: float(values[-1]) for name, values in {**told["train"], **told["eval"]}.items()}
        kept = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"]
        kept[3] = "kl" if kind == "kto" else kept[3]
        norms = {name: float(each.grad.norm()) for name, each in trainer.model.named_parameters() if each.grad is not None}
    return {
        "loss": float(loss),
        "metrics": {name: figures[name] for name in kept},
        "gradient_norms": norms,
        **_rows(kind, batch),
    }


if __name__ == "__main__":
    import trl

    STORED.write_text(
        json.dumps({"trl": trl.__version__} | {text: numbers(text) for text in CASES}, indent=1) + "\n", encoding="utf-8"
    )
    print(f"TRL {trl.__version__}: {len(CASES)} cases in {STORED}", file=sys.stderr)
