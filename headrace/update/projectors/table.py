"""The ways to choose projectors: one row for each."""

from collections.abc import Mapping

from headrace.update.projectors.block import BlockKind
from headrace.update.projectors.learned import LearnedKind
from headrace.update.projectors.projector import ProjectorKind
from headrace.update.projectors.random import RandomKind

PROJECTORS: Mapping[str, ProjectorKind] = {kind.name: kind for kind in (BlockKind(), LearnedKind(), RandomKind())}
