"""The ways to choose projectors: one row for each."""

from collections.abc import Mapping

from headrace.update.projectors.block import BlockKind
from headrace.update.projectors.learned import LearnedKind
from headrace.update.projectors.projector import Kind
from headrace.update.projectors.random import RandomKind

PROJECTORS: Mapping[str, Kind] = {kind.name: kind for kind in (BlockKind(), LearnedKind(), RandomKind())}
