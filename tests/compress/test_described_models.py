"""What a coded model's config.json says of its files, before they are here: the tensors that they would hold."""

import json
import shutil
from pathlib import Path

import pytest
from coded_models import KINDS, write_coded
from transformers import AutoConfig

from headrace.ask.model_config import open_coded
from headrace.cli.app import main
from headrace.model import Checkpoint, describe
from headrace.terms.errors import ConfigError

CODED = ["fp8", "fp8 experts", "mxfp4", "zero points"]
MORE = ["awq", "gptq", "gptq experts", "w8a16", "nvfp4", "nvfp4 modelopt", "fp8 channel", "fp8 tensor", "fp4 experts"]
COUNTS = ["--generate", "--prompt-length", "16", "--new-tokens", "4", "--machine", "t4", "--host-memory", "1GiB", "--json"]


def described(folder: Path, kind: str) -> Path:
    """Write a coded model whose configuration says all that its publisher would say; return its directory."""
    coded, _ = write_coded(folder, kind)
    config = json.loads((coded / "config.json").read_text())
    found = config["quantization_config"]
    if kind == "zero points":
        found["config_groups"]["group_0"]["targets"] = ["Linear"]
        found["config_groups"]["group_0"]["weights"]["group_size"] = 32
        found["ignore"] = ["lm_head"]
    elif kind == "fp8 experts":
        found["modules_to_not_convert"] = ["lm_head", "gate"]
    (coded / "config.json").write_text(json.dumps(config))
    return coded


@pytest.mark.parametrize("kind", [*CODED, *MORE])
def test_what_is_described_is_what_the_files_hold(tmp_path: Path, kind: str) -> None:
    coded = described(tmp_path, kind)
    files = Checkpoint.open(coded, decode=True)
    found = describe(coded / "config.json", AutoConfig.from_pretrained(coded))
    known = {key: (each.shape, each.dtype, getattr(each.coded, "codec", None)) for key, each in files.tensors.items()}
    assert any(codec for *_, codec in known.values())
    assert {key: (each.shape, each.dtype, getattr(each.coded, "codec", None)) for key, each in found.tensors.items()} == known


@pytest.mark.parametrize("kind", [*CODED[2:], "awq"])
def test_a_plan_by_config_json_alone_is_that_of_the_files(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    coded, plans = described(tmp_path, kind), []
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(coded / "config.json", alone)
    for model in (coded, alone / "config.json"):
        with pytest.raises(SystemExit):
            main(["plan", str(model), *COUNTS])
        plans.append(json.loads(capsys.readouterr().out))
    of_files, of_config = (plan["forecast"]["pass_seconds"] for plan in plans)
    assert of_config == pytest.approx(of_files, rel=0.02), "files have tensors in another order"


def test_a_code_whose_sizes_only_files_say_is_refused_by_name(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, "nf4")
    with pytest.raises(ConfigError, match="coded by bitsandbytes"):
        open_coded(coded / "config.json")
    assert KINDS["nf4"][1]["quant_method"] == "bitsandbytes"
