"""What all tests share: properties are tried on the same examples in each run, so that a red CI is the change's fault.

`make soak` draws fresh examples (`--hypothesis-profile=fresh`).
"""

import gc

import pytest
from hypothesis import settings
from ledger import MOST_PERCENT, Ledger

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ledger", action="store_true", help="fail if the tests of a folder take more than their share of the time"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("ledger") and not hasattr(config, "workerinput"):  # workers report to the process that started them
        config.pluginmanager.register(Ledger(MOST_PERCENT), "ledger")


def pytest_collection_finish() -> None:
    """Leave what imports made out of all collections to come: each takes a third of a second otherwise, and engines ask for
    one when they are opened.
    """
    gc.collect()
    gc.freeze()
