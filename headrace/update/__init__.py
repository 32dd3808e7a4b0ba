"""The update: rules over planes, the gradient's norm and clipping, on the CPU and on a device."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.update.rules.clip import HitRate, LossScale, clip_factor
    from headrace.update.rules.norm import BLOCK_ELEMENTS, add_block_sums, block_square_sums, square_sum
    from headrace.update.rules.rule import (
        GRADIENT_DTYPES,
        Checksums,
        Chunk,
        ElementRule,
        StepScalars,
        Summing,
        UpdateRule,
        group_pieces,
    )
    from headrace.update.rules.table import optimizer_of, rule_of
    from headrace.update.sites.device import DeviceUpdater
    from headrace.update.sites.host import Updater

__getattr__ = lazy_face(__name__)
