"""The engine runs where only torch, transformers, safetensors, numpy and numba are installed."""

import subprocess
import sys

# Refused where headrace asks for them; what transformers does with the optional libraries that it finds is its own business.
PROGRAM = """
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {"typer", "pydantic", "datasets", "rich", "yaml", "tensorboard", "pyarrow"}:
            return None
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").split(".")[0] in {"headrace", "__main__"}:
            raise ModuleNotFoundError(f"{name} is not for the engine", name=name)

sys.meta_path.insert(0, Refuse())
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM + program], capture_output=True, text=True, timeout=280)


def test_the_engine_needs_none_of_what_the_command_line_needs() -> None:
    done = run("import headrace; headrace.Engine; import headrace.engine.trainer")
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_line_does_need_them() -> None:
    """Or the test above could not fail."""
    done = run("import headrace.files.yaml_options")
    assert done.returncode != 0
    assert "is not for the engine" in done.stderr
