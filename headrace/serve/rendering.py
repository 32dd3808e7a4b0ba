"""A time for rendering a chat template: a program of the model's author on the words of a client, which could take hours."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator

from headrace.terms.errors import DataError

RENDER_SECONDS = 2.0


class _TooLong(BaseException):
    """Ends a rendering; no handler of a template's errors takes it for one of those."""


@contextlib.contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """While entered, this thread has so many seconds for what it does in Python.

    Raises:
        DataError: they were not enough.
    """
    thread, lock, is_over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()

    def end() -> None:
        with lock:
            if not is_over.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_TooLong))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        try:
            yield
        finally:
            with lock:
                is_over.set()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)  # where it has not been raised yet
            timer.cancel()
    except _TooLong as error:
        raise DataError(f"the chat template took more than {seconds:.0f} seconds for this conversation") from error
