"""Figures as people read them. Run: pytest tests/terms/test_plain_figures.py"""

import pytest

from headrace.terms.plain_figures import plain_figure


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0, 3, "0"), (0.01234, 3, "0.0123"), (999.96, 3, "1000"), (3352.4, 3, "3352"), (40842.3, 4, "40842"), (1234.4, 4, "1234")],
)
def test_large_figures_are_no_powers_of_ten(value: float, digits: int, text: str) -> None:
    assert plain_figure(value, digits) == text
