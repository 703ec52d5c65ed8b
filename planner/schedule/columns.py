"""A schedule's actions as columns of numbers, rank after rank: what the checks and the graph look at whole.

Lists of action tuples are what people and the executor read; whoever walks over all of a large schedule reads these.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from planner.schedule.actions import ActionKind, Schedule

Numbers = NDArray[np.int64]
KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_PLACE_OF_LETTER = np.zeros(128, dtype=np.int64)
_PLACE_OF_LETTER[[ord(kind.value) for kind in KINDS]] = range(len(KINDS))


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
        parts = [tuple(zip(*actions, strict=True)) or ((), (), ()) for actions in schedule.actions]
        letters = "".join(chain.from_iterable(kinds for _, kinds, _ in parts))
        return cls(
            stages=_joined(stages for stages, _, _ in parts),
            kinds=_PLACE_OF_LETTER[np.frombuffer(letters.encode("ascii"), dtype=np.uint8)],
            units=_joined(units for _, _, units in parts),
            first=np.array([0, *accumulate(map(len, schedule.actions))], dtype=np.int64),
        )


def _joined(parts: Iterable[Sequence[int]]) -> Numbers:
    return np.concatenate([np.array(part, dtype=np.int64) for part in parts])
