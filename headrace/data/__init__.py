"""Data sets become tokens, then packed and masked batches; the position in them is part of a run's state."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.data.batches.show import LengthBin as LengthBin
    from headrace.data.batches.show import Segment as Segment
    from headrace.data.batches.show import Summary as Summary
    from headrace.data.batches.show import length_histogram as length_histogram
    from headrace.data.batches.show import render_samples as render_samples
    from headrace.data.batches.show import summarize as summarize
    from headrace.data.batches.show import trained_stretches as trained_stretches
    from headrace.data.batches.stream import BatchStream as BatchStream
    from headrace.data.tokens.token_writer import TokenWriter as TokenWriter
    from headrace.data.tokens.token_writer import write_tokens as write_tokens
    from headrace.data.tokens.tokenize import asks_for_date as asks_for_date
    from headrace.data.tokens.tokenize import earlier_tokens as earlier_tokens
    from headrace.data.tokens.tokenize import load_tokens as load_tokens
    from headrace.data.tokens.tokenize import tokenizer_fingerprint as tokenizer_fingerprint
    from headrace.data.values.packing import EpochRows as EpochRows
    from headrace.data.values.packing import packed_rows as packed_rows
    from headrace.data.values.packing import single_rows as single_rows
    from headrace.data.values.tokens import TokenInfo as TokenInfo
    from headrace.data.values.tokens import TokenSet as TokenSet
    from headrace.data.values.values import IGNORED as IGNORED
    from headrace.data.values.values import Batch as Batch
    from headrace.data.values.values import DataSpec as DataSpec
    from headrace.data.values.values import Kind as Kind
    from headrace.data.values.values import Row as Row
    from headrace.data.values.values import Sample as Sample
    from headrace.data.values.values import Tokenizer as Tokenizer

__getattr__ = lazy_face(__name__)
