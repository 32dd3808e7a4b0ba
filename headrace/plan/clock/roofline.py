"""Rooflines: the time of an operation whose operands come by several ways, each with a bandwidth.

Source: the hierarchical roofline of MoE-Lightning (arXiv 2411.11217, section 3). If an operation is computed on one level of
memory and its data lie on another, the slowest decides: compute, or a level that its data cross.
"""


def roofline_seconds(flops: float, peak: float, *moved: tuple[float, float]) -> float:
    """Return the seconds of `flops` operations at `peak` per second.

    `moved` has for each level the bytes that cross it and its bytes per second; all cross at once.
    """
    return max([flops / peak, *[num_bytes / bandwidth for num_bytes, bandwidth in moved]])
