"""Filters for what Orbax prints when a save fails.

Orbax raises the error, and in addition it and the libraries below it print hundreds of tracebacks.
"""

import functools
import logging
import sys
import warnings
from typing import Any


@functools.cache
def silence_failed_saves() -> None:
    """Suppress the messages that a failed save leaves behind.

    These are the log of the error, which is raised as well, and reports about the writes of other leaves, which nobody
    awaits after the first write has failed.
    """
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)
    abandoned = ("exception was never retrieved", "destroyed but it is pending")
    logging.getLogger("asyncio").addFilter(lambda record: not any(words in record.getMessage() for words in abandoned))
    warnings.filterwarnings("ignore", "coroutine '.*serialize.*' was never awaited", RuntimeWarning)
    previous_hook = sys.unraisablehook

    def ignore_closed_loop(error: Any) -> None:
        """Ignore writes that end after Orbax, at the first error, has closed the event loop that TensorStore notifies.

        All other errors go to the previous hook.
        """
        if not (isinstance(error.exc_value, RuntimeError) and str(error.exc_value) == "Event loop is closed"):
            previous_hook(error)

    sys.unraisablehook = ignore_closed_loop
