"""A packed row gives a real model the losses of its samples alone. Run: pytest tests/data/test_data_crosstalk.py"""

from dataclasses import replace

import pytest
import torch
from made_tokenizers import make_tokens
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.data import IGNORED, BatchStream, DataSpec

LENGTHS = (9, 4, 2, 15, 7, 11, 3, 16, 5, 6)


def summed_loss(model, batch):
    given = {"position_ids": batch.position_ids, "attention_mask": batch.attention_mask}
    tensors = {name: torch.from_numpy(array) for name, array in given.items() if array is not None}
    logits = model(torch.from_numpy(batch.input_ids), use_cache=False, **tensors).logits[:, :-1]
    labels = torch.from_numpy(batch.labels)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_padded_and_single_samples_have_one_loss(tmp_path, attention):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation=attention)).eval()
    random = torch.Generator().manual_seed(1)
    samples = [(torch.randint(1, 50, (n,), generator=random).tolist(), [i % 3 > 0 for i in range(n)]) for n in LENGTHS]
    tokens = make_tokens(tmp_path / "set", samples, 16)
    spec = DataSpec(paths=("unused",), sequence_length=16, tokens_per_step=16)
    packed = BatchStream(tokens, spec)
    num_rows = round(packed.steps_per_epoch)
    assert num_rows < len(LENGTHS), "some samples must share rows for this test to say anything"
    whole = BatchStream(tokens, replace(spec, tokens_per_step=16 * num_rows)).next_batch()
    padded = BatchStream(tokens, replace(spec, tokens_per_step=16 * len(LENGTHS), packing=False)).next_batch()
    alone = BatchStream(tokens, replace(spec, packing=False))
    with torch.no_grad():
        expected = sum(summed_loss(model, alone.next_batch()) for _ in LENGTHS)
        for batch in (whole, padded):
            assert batch.num_trained_tokens == tokens.info.trained_tokens
            torch.testing.assert_close(summed_loss(model, batch), expected, rtol=1e-5, atol=0)
        without_positions = replace(whole, position_ids=None)
        assert abs(summed_loss(model, without_positions) - expected) > 1e-3, "the test must see cross-talk where there is some"
