"""Figures for people."""


def plain_figure(value: float, digits: int = 3) -> str:
    """Return `value` in `digits` significant digits, or whole where that takes more; large ones never as powers of ten."""
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text
