"""A time axis that several timelines share, and times as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from planner.errors import SpecError
from planner.schedule.events import Timeline

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))

_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True, slots=True)
class Axis:
    """The time that a picture shows."""

    start_seconds: float
    seconds: float
    """Never zero."""

    def ticks(self, most: int = 10) -> Iterator[tuple[float, str]]:
        """Round times on the axis, at most so many and one more, each with its text."""
        step = _round_up(self.seconds / most)
        size, unit = _unit(step)
        for number in range(
            math.ceil(self.start_seconds / step),
            math.floor(self.end_seconds / step + 1e-9) + 1,
        ):
            yield number * step, f"{number * step / size:.12g} {unit}"

    @property
    def end_seconds(self) -> float:
        """Where the axis ends."""
        return self.start_seconds + self.seconds


def common_axis(traces: Sequence[Timeline]) -> Axis:
    """The axis on which all timelines fit.

    Raises:
        SpecError: there is no timeline.
    """
    if not traces:
        raise SpecError(
            "there is no timeline to show.", field="traces", hint="give at least one."
        )
    start = min(trace.start_seconds for trace in traces)
    return Axis(start, (max(trace.end_seconds for trace in traces) - start) or 1.0)


def format_seconds(seconds: float) -> str:
    """Four digits, in the unit that suits: ``1.234 s``, ``56.78 ms``."""
    size, unit = _unit(seconds)
    return f"{seconds / size:.4g} {unit}"


def format_held(held: float, unit: str) -> str:
    """``4`` for units, ``1.5 GiB`` for bytes."""
    if unit != "bytes":
        return f"{held:g}"
    size, name = next((each for each in _BYTES if abs(held) >= each[0]), _BYTES[-1])
    return f"{held / size:.3g} {name}"


def _unit(seconds: float) -> tuple[float, str]:
    """The largest unit in which the time is at least 1."""
    return next(
        (each for each in _UNITS if abs(seconds) >= each[0] * (1 - 1e-9)),
        _UNITS[0 if not seconds else -1],
    )


def _round_up(seconds: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(seconds))
    return next(
        factor * power
        for factor in (1, 2, 5, 10)
        if factor * power >= seconds * (1 - 1e-9)
    )
