"""Where a model is cut into stages: so that the slowest stage has least to do."""

from collections.abc import Sequence

from headrace.terms.errors import ConfigError


def checked_cuts(cuts: Sequence[int], num_stages: int, num_blocks: int) -> tuple[int, ...]:
    """Return the cuts.

    Raises:
        ConfigError: there are not as many as stages need, or a stage would have no block.
    """
    if len(cuts) != num_stages - 1 or not all(0 < cut < num_blocks for cut in cuts):
        raise ConfigError(
            f"cuts: {list(cuts)} make {len(cuts) + 1} stages of the {num_stages} in --stages, of blocks 0 to {num_blocks - 1}; "
            "give the first block of each stage after the first"
        )
    return tuple(cuts)


def even_cuts(work: Sequence[float], num_stages: int, speeds: Sequence[float] = ()) -> tuple[int, ...]:
    """Return the block with which each stage after the first begins, so that the stage that takes longest takes least.

    Blocks have this much `work`; stages have these `speeds`, by default all the same.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    if len(work) < num_stages:
        raise ConfigError(f"stages: {num_stages} are named, but the model has {len(work)} blocks; name fewer")
    speeds = speeds or (1.0,) * num_stages
    # best[stop]: the most that a stage takes, and the cuts, for blocks up to `stop` in the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {stop: (sum(work[:stop]) / speeds[0], ()) for stop in range(1, len(work) + 1)}
    for stage in range(1, num_stages):
        best = {
            stop: min(
                (max(best[start][0], sum(work[start:stop]) / speeds[stage]), (*best[start][1], start))
                for start in range(stage, stop)
            )
            for stop in range(stage + 1, len(work) + 1)
        }
    return best[len(work)][1]
