"""The update: rules over planes, the gradient's norm and clipping, on the CPU and on a device."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.update.rules.clip import HitRate as HitRate
    from headrace.update.rules.clip import LossScale as LossScale
    from headrace.update.rules.clip import clip_factor as clip_factor
    from headrace.update.rules.norm import BLOCK_ELEMENTS as BLOCK_ELEMENTS
    from headrace.update.rules.norm import add_block_sums as add_block_sums
    from headrace.update.rules.norm import block_square_sums as block_square_sums
    from headrace.update.rules.norm import square_sum as square_sum
    from headrace.update.rules.rule import GRADIENT_DTYPES as GRADIENT_DTYPES
    from headrace.update.rules.rule import Checksums as Checksums
    from headrace.update.rules.rule import Chunk as Chunk
    from headrace.update.rules.rule import ElementRule as ElementRule
    from headrace.update.rules.rule import StepScalars as StepScalars
    from headrace.update.rules.rule import Summing as Summing
    from headrace.update.rules.rule import UpdateRule as UpdateRule
    from headrace.update.rules.rule import group_pieces as group_pieces
    from headrace.update.rules.table import optimizer_of as optimizer_of
    from headrace.update.rules.table import rule_of as rule_of
    from headrace.update.sites.device import DeviceUpdater as DeviceUpdater
    from headrace.update.sites.host import Updater as Updater

__getattr__ = lazy_face(__name__)
