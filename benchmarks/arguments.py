"""Types of the benchmarks' command-line values, for argparse."""

from __future__ import annotations

import argparse
import math


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, least=1)


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, least=0)


def positive_seconds(text: str) -> float:
    """A finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number above 0; give plain seconds, e.g. 30"
        )
    return value


def _whole(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least {least}"
        )
    return value
