"""Data sets to tokens to packed, masked batches; the position is part of a run's state."""

from headrace.data.packing import packed_rows, single_rows
from headrace.data.show import LengthBin, Segment, length_histogram, render_samples, summarize
from headrace.data.stream import BatchStream
from headrace.data.tokenize import load_tokens
from headrace.data.tokens import TokenSet, write_tokens
from headrace.data.values import IGNORED, Batch, DataSpec

__all__ = [
    "IGNORED",
    "Batch",
    "BatchStream",
    "DataSpec",
    "LengthBin",
    "Segment",
    "TokenSet",
    "length_histogram",
    "load_tokens",
    "packed_rows",
    "render_samples",
    "single_rows",
    "summarize",
    "write_tokens",
]
