"""Calls of a function that a thread repeats beside other work."""

import contextlib
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def repeat(call: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Call a function in a thread again and again, first after `seconds`, until the context ends.

    name: of the thread.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
