"""Held-out samples, whose loss is taken while a training goes on."""

from __future__ import annotations

from dataclasses import dataclass

from planner.executor.train.samples import Samples


@dataclass(frozen=True, slots=True)
class Validation:
    """What to look at, and when."""

    samples: Samples
    batches: int
    """Global batches, the first ones of the data, the same ones every time."""
    every: int | None
    """Steps between two looks; None: after the last step only."""

    def is_due(self, trained: int, steps: int) -> bool:
        """After so many steps, the last of them included."""
        return trained == steps or (
            self.every is not None and trained % self.every == 0
        )
