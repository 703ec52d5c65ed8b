"""A schedule's actions as columns of numbers, rank after rank: what the checks and the graph look at whole.

Most schedules are built as such columns (`planner.schedule.rows`); of others the actions are read once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from planner.schedule.actions import Schedule
from planner.schedule.rows import Numbers, Row


@dataclass(frozen=True)
class Columns:
    """All actions of a schedule; arrays of one length."""

    stages: Numbers
    kinds: Numbers
    """Places in `KINDS`."""
    units: Numbers
    first: Numbers
    """Per rank: where its actions begin; then where the last rank's end."""

    @cached_property
    def ranks(self) -> Numbers:
        """By action: where it runs."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @cached_property
    def places(self) -> Numbers:
        """By action: its place in its rank's list, from 0."""
        return np.arange(len(self.stages)) - self.first[self.ranks]

    @classmethod
    def of(cls, schedule: Schedule) -> Columns:
        """The columns of a schedule whose stages and units are known to be in range."""
        rows = [Row.read(row) for row in schedule.actions]
        return cls(
            stages=np.concatenate([row.stages for row in rows]),
            kinds=np.concatenate([row.kinds for row in rows]),
            units=np.concatenate([row.units for row in rows]),
            first=np.array([0, *accumulate(map(len, rows))], dtype=np.int64),
        )
