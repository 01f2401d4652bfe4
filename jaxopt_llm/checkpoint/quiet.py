"""Keeps Orbax, and what is under it, from printing a failed save by the hundred of tracebacks, besides raising it."""

import functools
import logging
import sys
import warnings
from typing import Any


@functools.cache
def silence() -> None:
    """What a failed save leaves behind: the log of the error that is raised as well, and writes of other leaves, which
    nobody awaits any more when the first has failed."""
    logging.getLogger("absl").addFilter(lambda record: record.levelno < logging.ERROR or "orbax" not in record.pathname)
    abandoned = ("exception was never retrieved", "destroyed but it is pending")
    logging.getLogger("asyncio").addFilter(lambda record: not any(words in record.getMessage() for words in abandoned))
    warnings.filterwarnings("ignore", "coroutine '.*serialize.*' was never awaited", RuntimeWarning)
    before = sys.unraisablehook

    def unraisable(error: Any) -> None:
        """TensorStore tells an event loop of each write that ends, and Orbax closes the loop at the first error."""
        if not (isinstance(error.exc_value, RuntimeError) and str(error.exc_value) == "Event loop is closed"):
            before(error)

    sys.unraisablehook = unraisable
