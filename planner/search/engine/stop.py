"""When a search stops: small callables over the best step, the bound and the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Stop = Callable[[int | None, int, int], bool]
"""Takes the best step (None: none yet), the lower bound in nanoseconds and the work."""
WORK_PER_SECOND = 1_500_000
"""Units of work per second of a time limit. A simulated action is one unit.

Most searches do more in a second (`python -m benchmarks.search_core`), so that work and
not the clock ends them, even on a somewhat slower machine."""
PRICE_WORK = 800
"""Units for pricing one layout."""
BOUND_WORK = 3_000
"""Units for bounding one row."""
OPTION_WORK = 400
"""Units for listing or bounding one option of a row."""
TEST_WORK = 1_500
"""Units for one capacity test, which compares several rows or options with the best plan."""
CUT_WORK = 2_000
"""Units for evaluating one cut, without its simulated actions."""


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
