"""Text of quantities with SI units, for the command line and pages."""

from __future__ import annotations

import math

GIB = 1024**3
SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value: float) -> str:
    """Return a time as text: ``0.0123`` -> ``12.3 ms``."""
    if value == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= scale:
            return f"{significant(value / scale)} {unit}"
    return f"{significant(value / 1e-9)} ns"


def gibibytes(value: float) -> str:
    """Return bytes as ``12.34 GiB``."""
    return f"{value / GIB:.2f} GiB"


def scaled(value: float, unit: str = "") -> str:
    """Return a quantity with an SI prefix: ``9.89e14, "FLOP/s"`` -> ``989 TFLOP/s``."""
    for scale, prefix in SCALES:
        if abs(value) >= scale:
            return f"{significant(value / scale)} {prefix}{unit}".rstrip()
    return f"{significant(value)} {unit}".rstrip()


def percent(value: float) -> str:
    """Return a fraction as a percentage: ``0.1234`` -> ``12.3 %``."""
    return f"{100 * value:.1f} %"


def significant(value: float, digits: int = 3) -> str:
    """Return a number with this many significant digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"
