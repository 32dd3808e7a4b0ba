"""A Hugging Face model as prologue, blocks, epilogue: flat layouts, safetensors in and out, costs."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.model.blocks.binding import GradientSink as GradientSink
    from headrace.model.blocks.chain_values import IGNORED as IGNORED
    from headrace.model.blocks.chain_values import BlockResult as BlockResult
    from headrace.model.blocks.chain_values import MicroBatch as MicroBatch
    from headrace.model.blocks.chain_values import PrologueResult as PrologueResult
    from headrace.model.blocks.chain_values import shift_labels as shift_labels
    from headrace.model.blocks.find_blocks import Blocks as Blocks
    from headrace.model.blocks.find_blocks import find_blocks as find_blocks
    from headrace.model.blocks.find_blocks import text_config as text_config
    from headrace.model.blocks.persistent import config_from as config_from
    from headrace.model.blocks.persistent import persistent_buffers as persistent_buffers
    from headrace.model.blocks.persistent import set_buffers as set_buffers
    from headrace.model.blocks.random_numbers import block_seed as block_seed
    from headrace.model.blocks.replay import Record as Record
    from headrace.model.blocks.replay import Replay as Replay
    from headrace.model.blocks.replay import ReplayMismatch as ReplayMismatch
    from headrace.model.blocks.replay import find_skippable as find_skippable
    from headrace.model.blocks.skeleton import build_skeleton as build_skeleton
    from headrace.model.blocks.taps import BlockCall as BlockCall
    from headrace.model.blocks.text_part import note_on as note_on
    from headrace.model.blocks.text_part import text_part as text_part
    from headrace.model.chain.chain import Chain as Chain
    from headrace.model.costs.cost_profile import Profiles as Profiles
    from headrace.model.costs.cost_profile import profile as profile
    from headrace.model.directory.checkpoint import Checkpoint as Checkpoint
    from headrace.model.directory.importing import import_unit as import_unit
    from headrace.model.directory.importing import import_workspace_bytes as import_workspace_bytes
    from headrace.model.directory.matching import WeightMap as WeightMap
    from headrace.model.directory.matching import load_buffers as load_buffers
    from headrace.model.directory.matching import match_weights as match_weights
    from headrace.model.kernels.products import WideProducts as WideProducts
    from headrace.model.trials.probe import Traits as Traits
    from headrace.model.trials.probe import probe as probe
    from headrace.model.trials.probe import self_check as self_check
    from headrace.model.trials.whole_check import check_whole as check_whole
    from headrace.model.written.export import Exporter as Exporter
    from headrace.model.written.export import exact_units as exact_units
    from headrace.model.written.export import export_bytes as export_bytes

__getattr__ = lazy_face(__name__)
