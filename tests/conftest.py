"""What all tests share: properties are tried on the same examples in each run, so that a red CI is the change's fault.

`make soak` draws fresh examples (`--hypothesis-profile=fresh`).
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("repeatable")
