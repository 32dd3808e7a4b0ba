"""The least time in which lanes can do their work, however well they overlap.

Lanes that run at once slow one another, so it is a choice which run together: `t[S]` seconds for each set `S` of lanes. Each
lane must get its work done. The least sum of all `t[S]` is a linear program (George Dantzig's simplex method solves it). What
is solved here is its dual: the answer are prices of the lanes' work at which no set earns more than one per second.

Invariant: the result follows from the arguments alone; no schedule of these lanes at these speeds takes less.
"""

from collections.abc import Callable, Mapping

from headrace.terms.lanes import Lane

Speeds = Callable[[tuple[Lane, ...]], Mapping[Lane, float]]

# Coefficients are about 1: anything smaller than this is a rounding error.
_NOTHING = 1e-11
# A dozen rounds are usual. Rounding errors could make it circle forever; what it has found is a lower bound at any time.
_MOST_PIVOTS = 1000


def least_seconds(alone: Mapping[Lane, float], speeds: Speeds) -> float:
    """Return the least seconds for work that takes each lane `alone[lane]` seconds alone.

    `speeds` gives, for busy lanes in the order of the table, the speed of each, at most 1.
    """
    lanes = [lane for lane in Lane if alone.get(lane, 0.0) > 0]
    if not lanes:
        return 0.0
    longest = max(alone[lane] for lane in lanes)
    sets = []
    for chosen in range(1, 1 << len(lanes)):
        speed = speeds(tuple(lane for bit, lane in enumerate(lanes) if chosen >> bit & 1))
        sets.append([speed.get(lane, 0.0) for lane in lanes])
    return longest * _greatest(sets, [alone[lane] / longest for lane in lanes])


def _greatest(rows: list[list[float]], gains: list[float]) -> float:
    """Return the greatest sum of `gains[j] * y[j]` over `y >= 0` with `sum of rows[i][j] * y[j] <= 1` for each row.

    It is the simplex method on a dictionary: each row expresses a variable that is not zero (at first its slack) by those that
    are. Variables are chosen in the order of their numbers (Bland's rule), so that it ends although many rows tie.
    """
    width = len(gains)
    table = [[*row, 1.0] for row in rows]
    target = [*gains, 0.0]
    zero, basic = list(range(width)), list(range(width, width + len(rows)))
    for _ in range(_MOST_PIVOTS):
        entering = [column for column in range(width) if target[column] > _NOTHING]
        if not entering:
            break
        column = min(entering, key=zero.__getitem__)
        bounding = [number for number, row in enumerate(table) if row[column] > _NOTHING]
        number = min(bounding, key=lambda index: (table[index][-1] / table[index][column], basic[index]))
        pivot = table[number]
        scale = 1.0 / pivot[column]
        table[number] = pivot = [value * scale for value in pivot]
        pivot[column] = scale
        for index, row in enumerate(table):
            if index != number and row[column]:
                table[index] = _without(row, column, pivot)
        value = target[-1] + target[column] * pivot[-1]
        target = _without(target, column, pivot)
        target[-1] = value
        zero[column], basic[number] = basic[number], zero[column]
    return target[-1]


def _without(row: list[float], column: int, pivot: list[float]) -> list[float]:
    """Return `row` after the variable of `column` is replaced by what the pivot row says it is."""
    factor = row[column]
    changed = [value - factor * other for value, other in zip(row, pivot, strict=True)]
    changed[column] = -factor * pivot[column]
    return changed
