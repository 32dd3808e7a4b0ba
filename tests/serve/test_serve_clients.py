"""Other programs ask the server: lm-eval's `local-completions` scores and continues what plain transformers does.

Run: make test-clients
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from served import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make test-clients")
pytest.importorskip("tenacity", reason="lm-eval has no api extra: make test-clients")

PAIRS = [("the turbine turns", " and water flows"), ("water", " w"), ("a b c", " d e f"), ("x", "waterwater")]


@pytest.fixture
def client(server: Server, model: Path) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    own = {"tokenizer": str(model), "tokenizer_backend": "huggingface", "max_length": 100, "batch_size": 2}
    return LocalCompletionsAPI(base_url=f"{server.serving.address}/completions", model="tiny", num_concurrent=2, **own)


def test_lm_eval_scores_as_plain_transformers(client: Any, model: Path) -> None:
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(PAIRS)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for (score, is_greedy), (before, after) in zip(client.loglikelihood(asked), PAIRS, strict=True):
        ids, start = tokenizer(before + after).input_ids, len(tokenizer(before).input_ids)
        with torch.no_grad():
            logits = plain(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        rows = [(logits[place - 1], ids[place]) for place in range(start, len(ids))]
        assert score == pytest.approx(sum(float(row[token]) for row, token in rows), abs=1e-3)
        assert is_greedy == all(int(row.argmax()) == token for row, token in rows)


def test_lm_eval_continues_as_the_server(client: Any, server: Server) -> None:
    from lm_eval.api.instance import Instance

    asked = [Instance("generate_until", {}, (text, {"until": ["e"], "max_gen_toks": 12}), 0) for text in ("water", "flows")]
    found = client.generate_until(asked)
    for text, answer in zip(("water", "flows"), found, strict=True):
        body = {"prompt": text, "temperature": 0, "max_tokens": 12, "stop": ["e"], "seed": 1234}
        assert answer == server.post("/v1/completions", **body).json()["choices"][0]["text"]
