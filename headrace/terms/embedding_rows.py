"""Tables whose rows are read in the model's files as they are asked for: an embedding, and tables within blocks."""

from dataclasses import dataclass

from headrace.terms.sizes import PAGE_BYTES, format_bytes, format_seconds, round_up

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


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """A `table` in the block of `unit`, of which a token asks for so many rows, `ids`."""

    unit: int
    table: EmbeddingRows
    ids: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes that a drive reads for a row."""
        return round_up(self.table.stored_bytes, PAGE_BYTES)

    def rows(self, tokens: int) -> int:
        """Return how many rows are read for `tokens` tokens at most: each once."""
        return min(self.table.rows, tokens * self.ids)

    def read_bytes(self, tokens: int) -> int:
        """Return the most bytes of pages that are read for `tokens` tokens."""
        return self.rows(tokens) * self.page_bytes

    def held_bytes(self, tokens: int) -> int:
        """Return the most host memory that reading for `tokens` tokens takes."""
        return self.table.held_bytes(tokens * self.ids)

    def seconds(self, tokens: int, bytes_per_second: float) -> float:
        """Return what reading for `tokens` tokens takes at most, from drives of this rate."""
        return max(self.rows(tokens) * SECONDS_PER_ROW, self.read_bytes(tokens) / bytes_per_second)

    def note(self, tokens: int, said: int | None = None) -> str:
        """Return a note for a person: which table is not in memory, and what a pass of `tokens` tokens reads of it. They are
        called `said` tokens, where rows are those of a pass.
        """
        size, rows, tokens_said = format_bytes(self.table.whole_bytes), self.rows(tokens), said or tokens
        if self.table.learns:
            return (
                f"a table of {size} in block {self.unit} is trained by rows, to the same bits: a micro-batch reads up to "
                f"{rows} rows, {format_bytes(self.read_bytes(tokens))} in pages, {format_seconds(rows * SECONDS_PER_ROW)}. To "
                "generate, export the run first"
            )
        return (
            f"a table of {size} in block {self.unit} stays in the model's files: each pass reads up to {rows} rows of "
            f"{tokens_said} tokens, {format_bytes(self.read_bytes(tokens))} in pages, {format_seconds(rows * SECONDS_PER_ROW)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFigures:
    """A table whose rows are read and updated one by one, as a plan sees it: `rows` of `width` numbers, `top` for a token."""

    rows: int
    width: int
    top: int

    def touched(self, tokens: int) -> int:
        """Return the most rows that a step of so many tokens touches."""
        return min(self.rows, self.top * tokens)

    def held_bytes(self, tokens: int, state_bytes: int, waiting: int) -> int:
        """Return the most host memory that a step takes for its rows. A number has `state_bytes` of states beside its weight.

        Rows that are held have a sum of gradients, too. Updated ones are copied, and wait for up to `waiting` commits.
        """
        number = 4 + state_bytes
        return self.touched(tokens) * self.width * (2 * (number + 4) + waiting * number)


def note_on_rows(whole_bytes: int) -> str:
    """Return a note for a person: the embedding is not in memory."""
    return f"rows of the embedding are read from the file as tokens ask for them: {format_bytes(whole_bytes)} stay there"


def note_on_learned_rows(tier: str, needed_bytes: int) -> str:
    """Return a note for a person: why the embedding is trained by rows, where the whole needs so much of a tier's memory."""
    why = f"the whole would need {format_bytes(needed_bytes)} of {tier} memory"
    return f"the embedding is trained by rows, to the same bits: {why}. To generate, export the run first"
