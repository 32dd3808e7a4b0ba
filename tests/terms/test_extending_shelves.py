"""The worked example of docs/extending.md: a policy of a shelf."""

from pathlib import Path

from extending import apply, run

RUN = """
from headrace.terms.shelf import Part, Shelf

parts = [Part(1, ((number, number + 1),)) for number in range(3)]
shelf = Shelf(2, "least-wanted")
for part, times in ((parts[0], 5), (parts[1], 2), (parts[2], 3), (parts[0], 1)):
    shelf.want(part, times)
    place = shelf.hold(part)
    shelf.arrived([part])
    shelf.release([part])
    print(place.is_there, sorted(parts.index(each) for each in shelf.parts))
"""


def test_the_part_leaves_that_was_wanted_least(tmp_path: Path) -> None:
    assert apply("A policy of a shelf", tmp_path) == {"headrace/terms/shelf.py"}
    assert run(tmp_path, "-c", RUN).splitlines() == ["False [0]", "False [0, 1]", "False [0, 2]", "True [0, 2]"]
