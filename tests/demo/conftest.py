"""The demo's scripts are no package: their folder goes on the import path, and that of the plain trainer to compare with."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "demo"), str(ROOT / "tests" / "equivalence")]
