"""The actions of one rank as columns of numbers, from which action tuples are made when somebody asks for them.

A large schedule has a million actions. The checks, the graph and the search look at numbers alone; only people, plans
and the executor read actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self, overload

import numpy as np
from numpy.typing import NDArray

from planner.schedule.actions import Action, ActionKind, Written

Numbers = NDArray[np.int64]
KINDS = (
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(len(KINDS))
"""Places in `KINDS`."""
_PLACE_OF_LETTER = np.zeros(128, dtype=np.int64)
_PLACE_OF_LETTER[[ord(kind.value) for kind in KINDS]] = range(len(KINDS))
_new_action: Callable[[tuple[int, ActionKind, int]], Action] = partial(
    tuple.__new__, Action
)
"""A named tuple's own constructor takes three times as long."""


@dataclass(frozen=True, slots=True)
class Units:
    """What a rank runs forward and backward once, in an order: arrays of one length."""

    stages: Numbers
    micro_batches: Numbers
    """With sequence chunks: micro-batch x chunks + chunk."""

    def __len__(self) -> int:
        """How many."""
        return len(self.stages)

    def reversed(self) -> Self:
        """The last first."""
        return type(self)(self.stages[::-1], self.micro_batches[::-1])


Part = tuple[Numbers, Numbers | int, Units]
"""Some actions of a rank: their places in its row, their kinds (places in `KINDS`; one number: of all), their units."""


@dataclass(frozen=True, eq=False)
class Row(Written):
    """The actions of a rank, in order: arrays of one length. It is read like the tuple of its actions."""

    stages: Numbers
    kinds: Numbers
    """Places in `KINDS`."""
    units: Numbers

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Self:
        """A row that its parts fill."""
        size = sum(len(places) for places, _, _ in parts)
        stages, kinds, units = (np.empty(size, dtype=np.int64) for _ in range(3))
        for places, kinds_there, part in parts:
            stages[places], kinds[places], units[places] = (
                part.stages,
                kinds_there,
                part.micro_batches,
            )
        return cls(stages, kinds, units)

    @classmethod
    def read(cls, actions: Sequence[Action]) -> Row:
        """The row of these actions, whether they are one or not."""
        if isinstance(actions, Row):
            return actions
        stages, letters, units = tuple(zip(*actions, strict=True)) or ((), (), ())
        kinds = _PLACE_OF_LETTER[
            np.frombuffer("".join(letters).encode("ascii"), dtype=np.uint8)
        ]
        return cls(
            np.array(stages, dtype=np.int64), kinds, np.array(units, dtype=np.int64)
        )

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All of them."""
        kinds = map(KINDS.__getitem__, self.kinds.tolist())
        return tuple(
            map(
                _new_action,
                zip(self.stages.tolist(), kinds, self.units.tolist(), strict=True),
            )
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """As every action is written: a row has few stages, and each of its units several times."""
        whats = self.stages * len(KINDS) + self.kinds
        of_what = {
            what: f"{what // len(KINDS)}{KINDS[what % len(KINDS)]}"
            for what in np.unique(whats).tolist()
        }
        of_unit = list(map(str, range(int(self.units.max(initial=-1)) + 1)))
        pairs = zip(whats.tolist(), self.units.tolist(), strict=True)
        return tuple([of_what[what] + of_unit[unit] for what, unit in pairs])

    def __len__(self) -> int:
        """How many."""
        return len(self.stages)

    def __iter__(self) -> Iterator[Action]:
        """In order."""
        return iter(self.actions)

    @overload
    def __getitem__(self, place: int) -> Action: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Action, ...]: ...
    def __getitem__(self, place: int | slice) -> Action | tuple[Action, ...]:
        """One or several of them."""
        return self.actions[place]

    def __eq__(self, other: object) -> bool:
        """The same actions, whether as a row or as a tuple."""
        if isinstance(other, Row):
            pairs = (
                (self.stages, other.stages),
                (self.kinds, other.kinds),
                (self.units, other.units),
            )
            return self is other or all(np.array_equal(*pair) for pair in pairs)
        return self.actions == other

    def __hash__(self) -> int:
        """That of the tuple that it equals."""
        return hash(self.actions)
