"""Which models draw random numbers, and from which seeds: functions of a place in a run, and of nothing that ran before."""

import hashlib

from torch import nn


def block_seed(seed: int, step: int, unit: int, micro: int) -> int:
    """Return the generator seed (63 bits) for running `unit` on micro-batch `micro` of `step`.

    A function of the position only, so that recomputation in backward and a resumed run draw the same numbers.
    """
    text = f"{seed}/{step}/{unit}/{micro}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def draws_random_numbers(model: nn.Module) -> bool:
    """Return whether any module holds a positive dropout or jitter rate; transformers keeps some as plain attributes."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        for name, value in vars(module).items():
            if isinstance(value, float) and value > 0 and ("dropout" in name or "pdrop" in name or "jitter" in name):
                return True
    return False
