"""Whether pipeline ranks, or replicas, have become slower than others, against the plan: told from noise. Torch-free.

    (R1)  ratio of a rank in a step = measured / predicted seconds of its actions; of a pipeline rank, the mean over its
          replicas; of a data-parallel rank, the mean over its stages
    (R2)  drift of a rank = median of its ratios over a look's steps / median of all ranks' medians
    (R3)  noise of a median of n ratios = 1.2533 x 1.4826 x median absolute deviation / sqrt(n)
          the standard error of the median of normal samples, by their robust deviation
          (Rousseeuw and Croux 1993; Kenney and Keeping 1962)
    (R4)  a rank is slow in a look when (R2) is at least `DRIFT` even if both of its medians are `SURE` noises off

A rank that drifts is slow in two looks in a row, which share no step. One look is not enough where ranks share cores:
whoever else works there slows one rank for seconds, and (R3) cannot know, for it sees the steps of that while only.
A plan that is wrong for all ranks alike has no drift: another partition would not help.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP_STEPS = 2
"""Of a launch: they allocate, connect and compile, and say nothing about its step time."""
LOOK_STEPS = 8
"""That a look takes in: those since the look before."""
DRIFT = 1.2
"""From here on a rank is slow. What several ranks of one machine differ by is less."""
SURE = 3.0
"""Noises that a median may be off by."""
_MEDIAN_NOISE = 1.2533 * 1.4826


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and how far off it may be."""

    value: float
    noise: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """Equation (R3)."""
        middle = statistics.median(samples)
        deviation = statistics.median(abs(each - middle) for each in samples)
        return cls(middle, _MEDIAN_NOISE * deviation / math.sqrt(len(samples)))

    @property
    def low(self) -> float:
        """It is hardly less."""
        return self.value - SURE * self.noise

    @property
    def high(self) -> float:
        """It is hardly more."""
        return self.value + SURE * self.noise


@dataclass(frozen=True, slots=True)
class Look:
    """What a number of steps tell."""

    drifts: tuple[float, ...]
    """Of every rank: equation (R2)."""
    slow: frozenset[int]
    """Ranks by equation (R4)."""


def look_at(steps: Sequence[Sequence[float]], predicted: Sequence[float]) -> Look:
    """What these steps tell.

    Args:
        steps: measured seconds of every rank's actions, of one step after the other.
        predicted: the same as the plan has it.
    """
    ratios = [
        Estimate.of([seconds / wanted for seconds in of_rank])
        for of_rank, wanted in zip(zip(*steps, strict=True), predicted, strict=True)
    ]
    # Of an even number the faster: with two ranks, one is measured by the other.
    middle = sorted(ratios, key=lambda each: each.value)[(len(ratios) - 1) // 2]
    slow = {
        rank
        for rank, ratio in enumerate(ratios)
        if ratio is not middle and ratio.low >= DRIFT * middle.high
    }
    return Look(tuple(ratio.value / middle.value for ratio in ratios), frozenset(slow))


class DriftWatch:
    """Looks at the steps of a launch, now and then: at its pipeline ranks, or at its data-parallel ones."""

    def __init__(self) -> None:
        self._steps: list[Sequence[float]] = []
        self._seen = WARM_UP_STEPS
        self._suspected_from = 0
        """First step of the look before."""
        self._suspects: frozenset[int] = frozenset()
        """Slow in the look before, and not told yet."""
        self._weighed: tuple[float, ...] = ()

    def record(self, busy_seconds: Sequence[float]) -> None:
        """A step is over; `busy_seconds` of every rank. One alone cannot be slower than others."""
        if len(busy_seconds) > 1:
            self._steps.append(busy_seconds)

    @property
    def is_due(self) -> bool:
        """Have there been enough steps since the look before?"""
        return len(self._steps) - self._seen >= LOOK_STEPS

    def look(self, predicted: Sequence[float]) -> tuple[float, ...] | None:
        """Drifts of all ranks, over both looks; None: none drifts, not yet, or only as was told before.

        Args:
            predicted: seconds of every rank's actions in a step.
        """
        begin, self._seen = self._seen, len(self._steps)
        found = look_at(self._steps[begin : self._seen], predicted)
        slow = found.slow if self._is_news(found.drifts) else frozenset()
        since, again = self._suspected_from, self._suspects & slow
        self._suspected_from, self._suspects = begin, slow
        if not again:
            return None
        both = look_at(self._steps[since : self._seen], predicted)
        self._weighed = both.drifts
        return both.drifts

    def _is_news(self, drifts: tuple[float, ...]) -> bool:
        """What was decided by about the same drifts is not less true later, with fewer steps left."""
        pairs = zip(drifts, self._weighed or (1.0,) * len(drifts), strict=True)
        return any(max(now / before, before / now) >= DRIFT for now, before in pairs)
