"""Stages that take what arrives first beside stages that follow a table made beforehand (1F1B), where times jitter.

Simulated on the virtual clock of stages (`headrace.peers.stages.pipeline`): nothing is measured. Equal seeds give equal tables.
A group's forward takes 1 s and its backward 3 s, each times a factor drawn evenly from 1 - JITTER to 1 + JITTER.

    python bench/stages.py --jitter 0.3
    python bench/stages.py --fusion

`--fusion` is FusionAI's claim, 50 RTX 3080 beside 4 H100, with these assumptions. A model has 80 equal blocks with hidden size
8192, 70 billion parameters. It costs 8 operations for each parameter and token, recompute included. A machine multiplies at the
rate of its profile, whose figures name their sources. Stages have one or two blocks; hidden states cross in 16 bits. States are
updated for nothing, and links lose nothing. Four H100 share out a step without any loss, so their line is their most.
"""

import argparse
import random
from collections.abc import Iterator
from statistics import mean

from headrace.peers.stages.pipeline import Row, Station, most_busy_share, run
from headrace.plan.clock.machine_profiles import load_profile

_FORWARD, _BACKWARD = 1.0, 3.0
_SEEDS = range(40)
# Of FusionAI's claim: the model, its stages, and the tokens of a group.
_PARAMETERS, _BLOCKS, _HIDDEN, _STAGES, _OPERATIONS, _GROUP_TOKENS = 70e9, 80, 8192, 50, 8, 2048
# Stages, groups, and seconds of a group on a link one way: none, a quarter and half of a group's time.
CASES = [(stages, 4 * stages, share * (_FORWARD + _BACKWARD)) for stages in (2, 4, 8) for share in (0.0, 0.25, 0.5)]


class InOrder(Row):
    """Stages that follow a table: first as many forwards as there are stages behind, then backward and forward in turn."""

    def _ready(self, place: int) -> bool:
        if place < self.count and self.head[self.count + place] < min(self.groups, self.head[place] + self.most[place]):
            return False
        return super()._ready(place)


def busy_shares(stages: int, groups: int, transfer: float, jitter: float) -> tuple[float, float, float]:
    """Return the most that a stage can be busy without jitter, and what it is by arrival and by the table, on average."""
    by_arrival, in_order = list[float](), list[float]()
    behind = range(stages, 0, -1)
    for seed in _SEEDS:
        draw = random.Random(seed)
        drawn = {
            (at, group, back): draw.uniform(1 - jitter, 1 + jitter) * (_BACKWARD if back else _FORWARD)
            for at in range(stages)
            for group in range(groups)
            for back in (False, True)
        }

        def times(stage: int, group: int, *, back: bool, drawn: dict[tuple[int, int, bool], float] = drawn) -> float:
            return drawn[stage, group, back]

        for kind, most, found in ((Row, [2 * each - 1 for each in behind], by_arrival), (InOrder, list(behind), in_order)):
            step = kind(most, [transfer] * (stages - 1), groups, times).step()
            found.append(groups * (_FORWARD + _BACKWARD) / step.step_seconds)
    return most_busy_share([_FORWARD + _BACKWARD] * stages, transfer, groups), mean(by_arrival), mean(in_order)


def table(jitter: float) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| stages | groups | a link takes | at most | what arrives first | 1F1B | gain |"
    yield "|---|---|---|---|---|---|---|"
    for stages, groups, transfer in CASES:
        most, arrival, fixed = busy_shares(stages, groups, transfer, jitter)
        yield (
            f"| {stages} | {groups} | {transfer / (_FORWARD + _BACKWARD):.0%} of a group | {most:.3f} | {arrival:.3f} | "
            f"{fixed:.3f} | {arrival / fixed - 1:+.1%} |"
        )


def small_beside_large(tokens: int, link_bytes_per_second: float) -> tuple[float, float]:
    """Return the tokens per second of 50 RTX 3080 in stages, and of 4 H100 that lose nothing."""
    small, large = (load_profile(name).matrix_flops_per_second("bfloat16") for name in ("rtx3080", "h100"))
    block = _OPERATIONS * _PARAMETERS / _BLOCKS  # of one token
    sizes = [1 + (at < _BLOCKS - _STAGES) for at in range(_STAGES)]
    groups = tokens // _GROUP_TOKENS
    stations = [
        Station(onward=seconds / 4, back=3 * seconds / 4, in_flight=2 * (_STAGES - at) - 1)
        for at, seconds in enumerate(size * block * _GROUP_TOKENS / small for size in sizes)
    ]
    transfer = 2 * _GROUP_TOKENS * _HIDDEN / link_bytes_per_second
    step = run(stations, [transfer] * (_STAGES - 1), groups)
    return tokens / step.step_seconds, 4 * large / (_OPERATIONS * _PARAMETERS)


def fusion() -> Iterator[str]:
    """Yield the lines of a table about FusionAI's claim."""
    yield "| link | tokens a step | 50 RTX 3080, tokens/s | 4 H100, tokens/s | share |"
    yield "|---|---|---|---|---|"
    for name, rate in (("100 Mbit/s", 12.5e6), ("1 Gbit/s", 1.25e8), ("10 Gbit/s", 1.25e9)):
        for tokens in (1 << 17, 1 << 19, 1 << 21):
            small, large = small_beside_large(tokens, rate)
            yield f"| {name} | {tokens} | {small:.0f} | {large:.0f} | {small / large:.2f} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jitter", type=float, default=0.3, help="the most by which a time differs, as a share of it")
    parser.add_argument("--fusion", action="store_true", help="50 RTX 3080 beside 4 H100")
    given = parser.parse_args()
    print("\n".join(fusion() if given.fusion else table(given.jitter)))


if __name__ == "__main__":
    main()
