"""A thread that can be stopped in the middle of code that knows nothing of it. It parks until it may continue; one thread runs
at a time.

Invariant: either a parked thread runs or the thread that resumes it, never both. Closing ends it wherever it is.
"""

import threading
from collections.abc import Callable

import torch


class _GivenUp(BaseException):
    """A signal, not an error: the thread is closed; its stack unwinds."""


class ParkedThread:
    """Runs `run` in a thread of its own, which begins parked and has as many of torch's threads as the thread that made it."""

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._run = run
        self._go, self._parked = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._closed = self._ended = False
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def go_on(self) -> None:
        """Let it run until it parks or ends.

        Raises:
            Whatever its code raises.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._parked.acquire()
        if self._error is not None:
            raise self._error

    def park(self) -> None:
        """Give way until `go_on`; to be called in the thread itself."""
        self._parked.release()
        self._go.acquire()
        if self._closed:
            raise _GivenUp

    def close(self) -> None:
        """End it where it is."""
        self._closed = True
        if self._thread.ident is not None and not self._ended:
            self._go.release()
            self._thread.join()

    def _serve(self) -> None:
        self._go.acquire()
        try:
            if not self._closed:
                torch.set_num_threads(self._threads)  # torch keeps the number of threads for each thread
                self._run()
        except _GivenUp:
            pass
        except BaseException as error:
            self._error = error
        self._ended = True
        self._parked.release()
