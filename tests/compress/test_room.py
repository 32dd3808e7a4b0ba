"""What of memory a compression gets for what, also where nothing lies behind the blocks.

Run: pytest tests/compress/test_room.py
"""

from pathlib import Path
from typing import Any

import pytest
from compressing import files_of, run, write_model
from tiers import sampled
from transformers import CONFIG_MAPPING

from headrace.codec.table import CODES
from headrace.compress import rounding
from headrace.compress.room import room_in
from headrace.model import Chain
from headrace.terms.options.optimizer import Optimizer

LLAMA = {"num_attention_heads": 4, "vocab_size": 320, "hidden_size": 64, "max_position_embeddings": 64}
OPT = LLAMA | {"ffn_dim": 128, "word_embed_proj_dim": 64}
# By the units behind the blocks: an OPT that norms after each block has none.
ENDS = {"norm": ("llama", LLAMA, 1), "norm, tied": ("llama", LLAMA | {"tie_word_embeddings": True}, 1)}
ENDS["nothing"] = ("opt", OPT | {"do_layer_norm_before": False}, 0)


@pytest.mark.parametrize("blocks", sampled([1, 2, 3]))
@pytest.mark.parametrize("ends", sampled(ENDS))
def test_the_largest_block_and_what_lies_around_the_blocks(ends: str, blocks: int) -> None:
    kind, values, behind = ENDS[ends]
    sizes: dict[str, Any] = values | {"num_hidden_layers": blocks}
    chain = Chain.from_config(CONFIG_MAPPING[kind](**sizes), "float32", Optimizer())
    units = [layout.num_elements for layout in chain.layouts]
    assert len(units) == 1 + blocks + behind
    room = room_in(chain, [None] * blocks, 1 << 30, 4, come_singly=False)
    assert room.block_bytes == 4 * max(units[1 : blocks + 1])
    assert room.ends_bytes == 4 * (units[0] + sum(units[blocks + 1 :]))


def test_codes_of_a_block_and_libraries_take_room_from_sums() -> None:
    chain = Chain.from_config(CONFIG_MAPPING["llama"](**LLAMA, num_hidden_layers=2), "float32", Optimizer())
    plain, coded = (room_in(chain, [None] * 2, 1 << 30, 2, come_singly=False, code=code) for code in (None, CODES["int4"]))
    matrices = sum(spec.num_elements for spec in chain.layouts[1].parameters if len(spec.shape) == 2)
    assert coded.codes_bytes == round(matrices * (4 + 16 / 128) / 8)
    assert coded.needed_bytes - plain.needed_bytes == coded.codes_bytes
    assert plain.sums_bytes - coded.sums_bytes == pytest.approx(coded.codes_bytes / 3, abs=1)
    assert plain.sums_bytes * 3 < (1 << 30) - (300 << 20)


def test_codes_that_would_take_much_room_are_encoded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same files, and never the codes of more than one matrix."""
    model, waited = write_model(tmp_path / "model", "mixtral"), list[int]()
    encode = rounding.BlockRounder.encode

    def noted(self: rounding.BlockRounder) -> None:
        waited.append(len(self._waiting))
        encode(self)

    monkeypatch.setattr(rounding.BlockRounder, "encode", noted)
    run(model, tmp_path / "late", sequence_length=32)
    late = max(waited)
    waited.clear()
    monkeypatch.setattr(rounding, "_MOST_WAITING_BYTES", 0)
    run(model, tmp_path / "early", sequence_length=32)
    assert max(waited) < late
    assert files_of(tmp_path / "early") == files_of(tmp_path / "late")


def test_a_model_of_one_block_and_nothing_behind_it_is_compressed(tmp_path: Path) -> None:
    """Its only block was taken for an end: a traceback."""
    model = write_model(tmp_path / "model", "opt", **OPT, num_hidden_layers=1, do_layer_norm_before=False)
    found = run(model, tmp_path / "run", sequence_length=32)
    assert found.loss_after == pytest.approx(found.loss_before, rel=0.1)
