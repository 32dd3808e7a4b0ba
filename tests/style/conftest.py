"""The figures of the house are a script's: `bench/` goes on the import path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
