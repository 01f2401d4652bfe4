"""How measurements end: exit codes, what a process complained of, and bars that were or were not reached."""

import re
from dataclasses import dataclass

NOT_MEASURED = 6  # exit code: nothing failed, and what was asked for has not all been measured; it is named


@dataclass(frozen=True)
class Verdict:
    """A claim or a bar, whether it holds, and by which figures."""

    said: str
    holds: bool
    found: str

    def line(self, holds: str = "PASS", fails: str = "FAIL") -> str:
        return f"{holds if self.holds else fails}  {self.said}\n         {self.found}"


def cause(complaints: str) -> str:
    """Of what a process wrote to standard error, the line that names the last exception, or the last line.

    An exception's text may go on for pages (XLA lists buffers), and JAX adds notes behind it.
    """
    lines = complaints.strip().splitlines()
    named = [line for line in lines if re.match(r"error: |[\w.]*(Error|Exception)\b", line)]
    return (named or lines or ["no reason given"])[-1]
