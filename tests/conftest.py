"""What all tests share: properties are tried on the same examples in each run, so that a red CI is the change's fault.

`make soak` draws fresh examples (`--hypothesis-profile=fresh`).
"""

import gc

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """Leave what imports made out of all collections to come: each takes a third of a second otherwise, and engines ask for
    one when they are opened.
    """
    gc.collect()
    gc.freeze()
