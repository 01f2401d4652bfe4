"""Wait of a program that is ready to train, until the supervisor of its job lets it begin.

An elastic job waits for missing hosts before it goes on without them. Meanwhile its supervisor starts the program on
the hosts that are there: it compiles its step, restores the state, and waits here for the end of that time.
"""

import os
import time
from collections.abc import Callable

# The steps may not begin before this time, by the monotonic clock, which all processes of a host share. The supervisor
# sets it.
HOLD_VARIABLE = "JAXOPT_LLM_HOLD_UNTIL"
_LOOK_SECONDS = 0.1


def hold_start(is_stopped: Callable[[], bool], say: Callable[[str], None]) -> None:
    """Wait until the steps may begin, or until a stop is requested."""
    begin = float(os.environ.get(HOLD_VARIABLE, 0))
    if (seconds := begin - time.monotonic()) > 0:
        say(f"ready; waits {seconds:.0f} s more for hosts that are missing")
    while time.monotonic() < begin and not is_stopped():
        time.sleep(_LOOK_SECONDS)
