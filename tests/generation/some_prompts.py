"""Prompts of token ids, for tiny models."""

import torch


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 160, (5 + (7 * index) % 6,), generator=generator).tolist() for index in range(count)]
