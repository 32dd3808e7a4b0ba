"""Data sets become tokens, then packed and masked batches; the position in them is part of a run's state."""

from headrace.data.packing import EpochRows, packed_rows, single_rows
from headrace.data.show import LengthBin, Segment, Summary, length_histogram, render_samples, summarize, trained_stretches
from headrace.data.stream import BatchStream
from headrace.data.tokenize import asks_for_date, earlier_tokens, load_tokens, tokenizer_fingerprint
from headrace.data.tokens import TokenInfo, TokenSet, TokenWriter, write_tokens
from headrace.data.values import IGNORED, Batch, DataSpec, Kind, Row, Sample, Tokenizer

__all__ = [
    "IGNORED",
    "Batch",
    "BatchStream",
    "DataSpec",
    "EpochRows",
    "Kind",
    "LengthBin",
    "Row",
    "Sample",
    "Segment",
    "Summary",
    "TokenInfo",
    "TokenSet",
    "TokenWriter",
    "Tokenizer",
    "asks_for_date",
    "earlier_tokens",
    "length_histogram",
    "load_tokens",
    "packed_rows",
    "render_samples",
    "single_rows",
    "summarize",
    "tokenizer_fingerprint",
    "trained_stretches",
    "write_tokens",
]
