"""Data sets become tokens, then packed and masked batches; the position in them is part of a run's state."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.data.batches.show import (
        LengthBin,
        Segment,
        Summary,
        length_histogram,
        render_samples,
        summarize,
        trained_stretches,
    )
    from headrace.data.batches.stream import BatchStream
    from headrace.data.tokens.token_writer import TokenWriter, write_tokens
    from headrace.data.tokens.tokenize import asks_for_date, earlier_tokens, load_tokens, tokenizer_fingerprint
    from headrace.data.values.packing import EpochRows, packed_rows, single_rows
    from headrace.data.values.tokens import TokenInfo, TokenSet
    from headrace.data.values.values import IGNORED, Batch, DataSpec, Kind, Row, Sample, Tokenizer

__getattr__ = lazy_face(__name__)
