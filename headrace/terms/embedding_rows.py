"""An embedding whose rows are read in the model's files as tokens ask for them: what a plan knows of it."""

from dataclasses import dataclass

from headrace.terms.sizes import format_bytes

# What a processor spends on a row, of which eight are read at a time (docs/log/embedding-rows).
SECONDS_PER_ROW = 20e-6
# The numbers and places of a token's row while rows are found: integers of 64 bits.
_BYTES_PER_TOKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRows:
    """A table of so many `rows`. To read a row takes `stored_bytes`; it has `computed_bytes` in the dtype of compute.

    Where it `learns`, a step updates the rows that its tokens name, and writes half of what it reads of them. Nothing changes
    the others.
    """

    rows: int
    stored_bytes: int
    computed_bytes: int
    learns: bool = False

    @property
    def whole_bytes(self) -> int:
        """Bytes of the whole table in the dtype of compute."""
        return self.rows * self.computed_bytes

    def read_bytes(self, tokens: int) -> int:
        """Return the most bytes that are read for `tokens` tokens: a row that several have is read once."""
        return min(self.rows, tokens) * self.stored_bytes

    def held_bytes(self, tokens: int) -> int:
        """Return the most host memory that reading for `tokens` tokens takes: rows as stored, as computed, and by token."""
        rows = min(self.rows, tokens)
        return rows * (self.stored_bytes + self.computed_bytes) + tokens * (self.computed_bytes + _BYTES_PER_TOKEN)

    def seconds(self, tokens: int, bytes_per_second: float) -> float:
        """Return what reading for `tokens` tokens takes at most, from drives of this rate."""
        return max(min(self.rows, tokens) * SECONDS_PER_ROW, self.read_bytes(tokens) / bytes_per_second)


def note_on_rows(whole_bytes: int) -> str:
    """Return a note for a person: the embedding is not in memory."""
    return f"rows of the embedding are read from the file as tokens ask for them: {format_bytes(whole_bytes)} stay there"


def note_on_learned_rows(tier: str, needed_bytes: int) -> str:
    """Return a note for a person: why the embedding is trained by rows, where the whole needs so much of a tier's memory."""
    why = f"the whole would need {format_bytes(needed_bytes)} of {tier} memory"
    return f"the embedding is trained by rows, to the same bits: {why}. To generate, export the run first"
