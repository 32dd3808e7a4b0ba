"""Prompts of token ids, for tiny models."""

import torch

# Six tokens, each the likeliest, with logits.
GREEDY = {
    "max_new_tokens": 6,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 160, (5 + (7 * index) % 6,), generator=generator).tolist() for index in range(count)]
