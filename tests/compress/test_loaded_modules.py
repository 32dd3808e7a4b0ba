"""What generates, measures or compresses loads nothing of training, seen after the command. Run: pytest tests/compress"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compressing import write_model
from wings import of_training

PROGRAM = """
import json, sys
from headrace.cli import main
try:
    main(json.loads(sys.argv[1]))
except SystemExit as end:
    assert not end.code, end.code
print("LOADED" + json.dumps(sorted(sys.modules)))
"""


@pytest.mark.deep
def test_after_a_command_nothing_of_training_is_loaded(tmp_path: Path) -> None:
    model, data = write_model(tmp_path / "model"), tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"text number {number} of a few"}) + "\n" for number in range(12)))
    commands = [
        ["generate", str(model), "--prompt", "text", "--raw", "--max-new-tokens", "2", "--host-memory", "2GiB"],
        ["eval", str(model), "--data", str(data), "--host-memory", "2GiB"],
        ["compress", str(model), str(tmp_path / "out"), "--to", "int4", "--data", str(data), "--sequence-length", "16"],
    ]
    for command in commands:
        words = [sys.executable, "-c", PROGRAM, json.dumps(command)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        names = json.loads(done.stdout.rpartition("LOADED")[2])
        assert [name for name in names if of_training(name)] == [], command[0]
