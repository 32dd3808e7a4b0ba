"""What is kept of prompts whose beginnings come again: whole chunks of one length, and the memory that they may take."""

from dataclasses import dataclass

from headrace.terms.costs import GenerationCosts
from headrace.terms.sizes import format_bytes

# Lengths of chunks that are tried, and how much longer reading a prompt of full length may take with the one that is chosen.
PREFIX_CHUNKS, MOST_TIMES = (128, 256, 512, 2048), 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """Chunks of `chunk` tokens of a prompt are kept, each in about `chunk_bytes`, all of them in `memory_bytes`, and then
    in `ssd_bytes` of a drive.
    """

    chunk: int
    chunk_bytes: int
    memory_bytes: int
    ssd_bytes: int = 0

    @property
    def words(self) -> str:
        """Return it in words."""
        kept = self.memory_bytes // self.chunk_bytes
        of = f"{kept} chunks of {self.chunk} tokens are kept" if kept else f"no chunk of {self.chunk} tokens is kept"
        drive = f"; {format_bytes(self.ssd_bytes)} on a drive, which outlive the server" if self.ssd_bytes else ""
        return f"{of}: {format_bytes(self.memory_bytes)} of host memory, {format_bytes(self.chunk_bytes)} each{drive}"


def prefix_chunk_bytes(costs: GenerationCosts, chunk: int) -> int:
    """Return the bytes of what a chunk of one row leaves: its tokens, and all that layers which do not grow so hold."""
    blocks = zip(costs.cache_bytes, costs.cache_token_bytes, costs.tiered, strict=True)
    return max(1, sum(chunk * token if grows else whole for whole, token, grows in blocks))
