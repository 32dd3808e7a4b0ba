"""How many tokens of a cache to keep as block inputs, whose keys and values are computed again in each pass (KVPR).

Jiang et al. 2024, arXiv 2411.17089, with a hidden size of h and keys of k numbers a token, which grouped queries make smaller
than h. Inputs of l tokens are brought first; while their keys and values are computed, those of the other tokens are brought.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenSeconds:
    """Seconds a token: to bring its `input`, to bring its keys and values (`cache`), and to `recompute` these."""

    input: float
    cache: float
    recompute: float

    @classmethod
    def of(
        cls,
        hidden: int,
        keys: int,
        *,
        flops_per_second: float,
        bytes_per_second: float,
        input_bytes: float = 2.0,
        cache_bytes: float = 2.0,
    ) -> "TokenSeconds":
        """Return those of one token: `hidden` numbers of an input, `keys` numbers of its keys and as many of its values.

        `input_bytes` and `cache_bytes` are those of a number. Only the two products that make keys and values are counted.
        """
        return cls(
            hidden * input_bytes / bytes_per_second,
            2 * keys * cache_bytes / bytes_per_second,
            4.0 * hidden * keys / flops_per_second,
        )

    def of_split(self, tokens: int, kept: float) -> float:
        """Return the seconds until keys and values of `tokens` tokens are there, `kept` of which are brought as inputs."""
        return kept * self.input + max(kept * self.recompute, (tokens - kept) * self.cache)

    def best_share(self) -> float:
        """Return the share of tokens to keep as inputs that takes least: 0 unless an input takes less than keys and values.

        Each further input replaces longer reading until computing takes as long as the reading that is left.
        """
        return self.cache / (self.recompute + self.cache) if self.input < self.cache else 0.0
