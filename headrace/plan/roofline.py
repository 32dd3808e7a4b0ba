"""Rooflines: what an operation attains where its operands come by several ways, each with a bandwidth.

Source: the hierarchical roofline of MoE-Lightning (arXiv 2411.11217, section 3). An operation's *intensity* at a level of
memory is its operations over the bytes of that level that it touches. Where it is computed on one level and its data lie on
another, it attains the least of the peak and of bandwidth times intensity at each level that its data cross. All rates are per
second.
"""


def intensity(flops: float, num_bytes: float) -> float:
    """Return the operations for each byte that is touched; infinity where none is."""
    return flops / num_bytes if num_bytes else float("inf")


def attainable(peak: float, *roofs: tuple[float, float]) -> float:
    """Return the operations per second of what has `peak` and, as `roofs`, a bandwidth and an intensity for each level."""
    return min([peak, *(bandwidth * found for bandwidth, found in roofs)])


def roofline_seconds(flops: float, peak: float, *moved: tuple[float, float]) -> float:
    """Return what `flops` operations take that move, at each level, so many bytes at such a bandwidth, all at once.

    It is the operations over what is `attainable`, and defined without any, too.
    """
    return max([flops / peak, *[num_bytes / bandwidth for num_bytes, bandwidth in moved]])


def stays_where_data_lie(there: float, link: float, far_intensity: float) -> bool:
    """Return whether computing where the data lie, at `there` operations per second, beats sending them over the `link`.

    It is the first turning point: below an intensity of `there / link` the link would attain less.
    """
    return link * far_intensity < there
