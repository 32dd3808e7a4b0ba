"""A thread of membership: it watches over peers, or shows that this one lives.

Invariant: it never dies in silence. What nobody expected is kept, whoever waits is woken, and the next look raises it, which
ends the process with a line.
"""

import threading
from collections.abc import Callable

from headrace.terms.errors import MembershipFailed, in_one_line


class Watchman:
    """Does `work` in a thread called `name`. If that fails, `wake` gets the words for those who wait."""

    def __init__(self, work: Callable[[], None], name: str, wake: Callable[[str], None]) -> None:
        self._work, self._wake = work, wake
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"headrace {name}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the thread died of.

        Raises:
            MembershipFailed: it died of what nobody expected.
        """
        if self._failure is not None:
            raise MembershipFailed(self._failure)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # also what nobody expects: peers are watched no more
            name = self._thread.name.removeprefix("headrace ")
            words = f"the thread of {name} failed ({in_one_line(error)}); what is committed is untouched: start it again"
            self._failure = f"{words}, and report it"
            self._wake(self._failure)
