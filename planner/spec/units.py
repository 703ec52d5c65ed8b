"""SI units as people read them; only the edges (command line, pages) speak them."""

from __future__ import annotations

import math

GIB = 1024**3
SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value: float) -> str:
    """``0.0123`` -> ``12.3 ms``."""
    if value == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{significant(value / scale)} {unit}"
    return f"{significant(value / 1e-9)} ns"


def gibibytes(value: float) -> str:
    """Bytes -> ``12.34 GiB``, the unit in which device memory is sold and reported."""
    return f"{value / GIB:.2f} GiB"


def scaled(value: float, unit: str = "") -> str:
    """``9.89e14, "FLOP/s"`` -> ``989 TFLOP/s``, by powers of a thousand."""
    for scale, prefix in SCALES:
        if abs(value) >= scale:
            return f"{significant(value / scale)} {prefix}{unit}".rstrip()
    return f"{significant(value)} {unit}".rstrip()


def percent(value: float) -> str:
    """``0.1234`` -> ``12.3 %``."""
    return f"{100 * value:.1f} %"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, never in exponent form."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"
