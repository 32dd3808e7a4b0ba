"""What arrives first keeps stages busier than a table does, also in the bench's own table."""

import pytest
from stages import busy_shares, table


def test_arrival_beats_the_table_and_no_stage_is_busier_than_it_can_be() -> None:
    for stages, transfer in ((2, 0.0), (3, 2.0)):
        most, arrival, fixed = busy_shares(stages, 4 * stages, transfer, 0.3)
        assert fixed < arrival < most


@pytest.mark.wide
def test_the_table_has_a_row_for_each_case() -> None:
    assert len(list(table(0.0))) == 11
