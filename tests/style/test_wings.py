"""The wings: what generates and what compresses loads nothing of training, but the opener of models. Run: pytest tests/style"""

from pathlib import Path

import pytest
from house import imported
from test_layers import FILES, ROOT, TREES, imports, package_of
from wings import OPENER, of_training

WINGS = ("generate", "compress", "serve")


def modules() -> dict[str, Path]:
    return {
        ".".join(("headrace", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path for path in FILES
    }


def loaded_with(start: str, known: dict[str, Path]) -> set[str]:
    """Return the modules that are loaded when `start` is imported."""
    found, left = set[str](), [start]
    while left:
        module = left.pop()
        if module in known and module not in found:
            found.add(module)
            left += imported(TREES[known[module]], for_types=False)
            left.append(module.rpartition(".")[0])
    return found - {""}


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_loads_nothing_of_training(wing: str) -> None:
    known = modules()
    starts = [module for module in known if module.startswith(f"headrace.{wing}")]
    found = {start: sorted(filter(of_training, loaded_with(start, known))) for start in starts}
    assert len(starts) > 5
    assert {start: names for start, names in found.items() if names} == {}


@pytest.mark.parametrize("wing", WINGS)
def test_inside_functions_only_the_opener_is_imported(wing: str) -> None:
    """And what reads a run directory, which the opener loads."""
    names = {name for path in FILES if package_of(path) == wing for _, name in imports(path)}
    assert [name for name in sorted(names) if name.startswith("headrace.engine") and not name.startswith(OPENER)] == []


def test_what_loads_training_is_seen() -> None:
    assert any(map(of_training, loaded_with("headrace.engine.trainer", modules())))
    assert of_training("headrace.update.rules.rule")
    assert not of_training("headrace.plan.schedules.ledger")
