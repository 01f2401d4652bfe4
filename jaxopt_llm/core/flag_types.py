"""Types of command-line flags, for argparse: each one returns a value or says what the flag must be."""

import argparse
import math


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or a larger whole number")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or a larger whole number")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds, 0 or larger")
    return value
