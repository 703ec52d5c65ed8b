"""When a search stops: small callables over the best step, the bound and the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Stop = Callable[[int | None, int, int], bool]
"""Takes the best step (None: none yet), the lower bound in nanoseconds and the work."""
WORK_PER_SECOND = 1_500_000
"""Units of work that stand for a second of a time limit; a simulated action is one. They
mostly take less (`python -m benchmarks.search_core`), so that work and not the clock ends
searches, even on somewhat slower machines."""
PRICE_WORK = 800
"""Of a layout that is priced."""
BOUND_WORK = 3_000
"""Of a row that is bounded."""
OPTION_WORK = 400
"""Of an option that is listed or bounded."""
TEST_WORK = 1_500
"""Of a test whether any of several rows or options may beat the best plan."""
CUT_WORK = 2_000
"""Of a cut that is evaluated, in addition to its actions."""


@dataclass(frozen=True, slots=True)
class GapStop:
    """Stop when the best step is within a fraction of the bound."""

    gap: float = 0.0

    def __call__(self, best: int | None, bound: int, work: int) -> bool:
        """Return whether the gap is reached."""
        return best is not None and bound >= best * (1 - self.gap)


@dataclass(frozen=True, slots=True)
class WorkStop:
    """Stop after an amount of work, which does not depend on the machine."""

    work: int

    @classmethod
    def of_seconds(cls, seconds: float) -> WorkStop:
        """Return the limit that stands for a time."""
        return cls(int(seconds * WORK_PER_SECOND))

    def __call__(self, best: int | None, bound: int, work: int) -> bool:
        """Return whether the work is done."""
        return work >= self.work


@dataclass(frozen=True, slots=True)
class AnyStop:
    """Stop when one of several criteria is met."""

    criteria: tuple[Stop, ...]

    def __call__(self, best: int | None, bound: int, work: int) -> bool:
        """Return whether any criterion is met."""
        return any(stop(best, bound, work) for stop in self.criteria)
