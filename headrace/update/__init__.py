"""The update: rules over planes, the gradient's norm and clipping, on the CPU and on a device."""

from headrace.update.clip import HitRate, LossScale, clip_factor
from headrace.update.norm import BLOCK_ELEMENTS, add_block_sums, block_square_sums, square_sum
from headrace.update.rule import (
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

__all__ = [
    "BLOCK_ELEMENTS",
    "GRADIENT_DTYPES",
    "Checksums",
    "Chunk",
    "DeviceUpdater",
    "ElementRule",
    "HitRate",
    "LossScale",
    "StepScalars",
    "Summing",
    "UpdateRule",
    "Updater",
    "add_block_sums",
    "block_square_sums",
    "clip_factor",
    "group_pieces",
    "optimizer_of",
    "rule_of",
    "square_sum",
]
