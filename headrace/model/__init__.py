"""A Hugging Face model as prologue, blocks, epilogue: flat layouts, safetensors in and out, costs."""

from typing import TYPE_CHECKING

from headrace.terms.faces import lazy_face

if TYPE_CHECKING:
    from headrace.model.blocks.binding import GradientSink
    from headrace.model.blocks.chain_values import IGNORED, BlockResult, MicroBatch, PrologueResult, shift_labels
    from headrace.model.blocks.find_blocks import Blocks, find_blocks, text_config
    from headrace.model.blocks.persistent import config_from, persistent_buffers, set_buffers
    from headrace.model.blocks.random_numbers import block_seed
    from headrace.model.blocks.replay import Record, Replay, ReplayMismatch, find_skippable
    from headrace.model.blocks.skeleton import build_skeleton
    from headrace.model.blocks.taps import BlockCall
    from headrace.model.blocks.text_part import note_on, text_part
    from headrace.model.chain.chain import Chain
    from headrace.model.costs.cost_profile import Profiles, profile
    from headrace.model.directory.checkpoint import Checkpoint
    from headrace.model.directory.described import describe
    from headrace.model.directory.importing import import_unit, import_workspace_bytes
    from headrace.model.directory.matching import WeightMap, load_buffers, match_weights
    from headrace.model.kernels.products import WideProducts
    from headrace.model.trials.probe import Traits, probe, self_check
    from headrace.model.trials.whole_check import check_whole
    from headrace.model.written.export import Exporter, exact_units, export_bytes

__getattr__ = lazy_face(__name__)
