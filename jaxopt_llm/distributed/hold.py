"""Wait of a program that is ready to train, until the supervisor of its job lets it begin.

An elastic job waits for missing hosts before it goes on without them. Meanwhile its supervisor starts the program on
the hosts that are there: it compiles its step, restores the state, and waits here for the end of that time.
"""

import os
import time
from collections.abc import Callable

HOLD_VARIABLE = "JAXOPT_LLM_HOLD_SECONDS"  # from the start of the program; the supervisor sets it
_LOOK_SECONDS = 0.1
_started = time.monotonic()


def hold_start(is_stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Wait for the time before which the steps may not begin, or for a request to stop."""
    begin = _started + float(os.environ.get(HOLD_VARIABLE, 0))
    if (seconds := begin - time.monotonic()) > 0:
        say(f"ready; waits {seconds:.0f} s more for hosts that are missing")
    while time.monotonic() < begin and not is_stopped():
        time.sleep(_LOOK_SECONDS)
