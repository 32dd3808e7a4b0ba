"""A Hugging Face model as prologue, blocks, epilogue: flat layouts, safetensors in and out, costs."""

from headrace.model.binding import GradientSink
from headrace.model.chain import Chain, block_seed
from headrace.model.chain_values import IGNORED, BlockResult, MicroBatch, PrologueResult, shift_labels
from headrace.model.checkpoint import Checkpoint
from headrace.model.cost_profile import Profiles, profile
from headrace.model.export import Exporter, export_bytes
from headrace.model.find_blocks import Blocks, find_blocks, text_config
from headrace.model.importing import import_unit, import_workspace_bytes
from headrace.model.matching import WeightMap, load_buffers, match_weights
from headrace.model.persistent import config_from, persistent_buffers, set_buffers
from headrace.model.probe import Traits, probe, self_check
from headrace.model.products import WideProducts
from headrace.model.replay import Record, Replay, ReplayMismatch, find_skippable
from headrace.model.skeleton import build_skeleton
from headrace.model.taps import BlockCall
from headrace.model.text_part import note_on, text_part
from headrace.model.whole_check import check_whole

__all__ = [
    "IGNORED",
    "BlockCall",
    "BlockResult",
    "Blocks",
    "Chain",
    "Checkpoint",
    "Exporter",
    "GradientSink",
    "MicroBatch",
    "Profiles",
    "PrologueResult",
    "Record",
    "Replay",
    "ReplayMismatch",
    "Traits",
    "WeightMap",
    "WideProducts",
    "block_seed",
    "build_skeleton",
    "check_whole",
    "config_from",
    "export_bytes",
    "find_blocks",
    "find_skippable",
    "import_unit",
    "import_workspace_bytes",
    "load_buffers",
    "match_weights",
    "note_on",
    "persistent_buffers",
    "probe",
    "profile",
    "self_check",
    "set_buffers",
    "shift_labels",
    "text_config",
    "text_part",
]
