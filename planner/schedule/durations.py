"""How long actions and transfers last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from planner.errors import LayoutError

OF_ACTIONS = ("forward", "backward_input", "backward_weight", "recompute", "overlap")
OF_TRANSFERS = ("transfer_forward", "transfer_backward")
_REQUIRED = OF_ACTIONS[:3]


@dataclass(frozen=True, slots=True)
class Durations:
    """Time of every kind of action by stage, and of every transfer by stage boundary.

    Any consistent unit of time will do, seconds by convention. Whole numbers stay whole, so that results are exact.
    A full backward lasts ``recompute + backward_input + backward_weight``, a split input gradient
    ``recompute + backward_input``. Boundary ``s`` lies between stage ``s`` and ``s + 1``.

    Times of actions are given per stage. With ``sequence_chunks`` above 1 they are given per stage and chunk, at
    ``stage * sequence_chunks + chunk``: under causal attention later chunks of equal length last longer.

    Raises:
        LayoutError: lengths that do not fit together, or a time that is negative or not finite.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...] = ()
    """Running the forward again before the backward; empty: nothing is recomputed."""
    transfer_forward: tuple[float, ...] = ()
    """Activations from stage s to s + 1, after the forward has ended; empty: no time."""
    transfer_backward: tuple[float, ...] = ()
    """Gradients from stage s + 1 to s; empty: no time."""
    overlap: tuple[float, ...] = ()
    """What an action that is paired with the one before it saves (`Schedule.paired`); empty: nothing."""
    sequence_chunks: int = 1
    """Values per stage."""

    def __post_init__(self) -> None:
        for name in (*OF_ACTIONS, *OF_TRANSFERS):
            length = len(self.forward) if name in OF_ACTIONS else self.stages - 1
            if name not in _REQUIRED and not getattr(self, name):
                object.__setattr__(self, name, (0,) * length)
            self._check_length(name, length)
            _check_times(name, getattr(self, name))
        self._check_chunks()
        self._check_overlap()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward) // self.sequence_chunks

    @classmethod
    def uniform(
        cls,
        stages: int,
        *,
        forward: float = 1,
        backward_input: float = 1,
        backward_weight: float = 1,
        recompute: float = 0,
        transfer: float = 0,
        overlap: float = 0,
    ) -> Self:
        """The same for every stage and boundary."""
        return cls(
            forward=(forward,) * stages,
            backward_input=(backward_input,) * stages,
            backward_weight=(backward_weight,) * stages,
            recompute=(recompute,) * stages,
            transfer_forward=(transfer,) * (stages - 1),
            transfer_backward=(transfer,) * (stages - 1),
            overlap=(overlap,) * stages,
        )

    def recompute_of(self, stage: int, unit: int) -> float:
        """Time of recomputing this unit of this stage."""
        return self.recompute[
            stage * self.sequence_chunks + unit % self.sequence_chunks
        ]

    def of_actions(self, chunks: int = 1) -> list[float]:
        """Times by ``(work * stages + stage) * chunks + chunk``, the works in the order of `planner.schedule.needs`.

        Times given per stage hold for each of its chunks.
        """
        forward, backward_input, weight, recompute, overlap = (
            self._spread(name, chunks) for name in OF_ACTIONS
        )
        plain = _add(backward_input, weight)
        works = (
            forward,
            _add(recompute, plain),
            _add(recompute, backward_input),
            weight,
            recompute,
            plain,
            _subtract(forward, overlap),
            _subtract(_add(recompute, plain), overlap),
            [0] * len(forward),
        )
        return [seconds for work in works for seconds in work]

    def of_transfers(self) -> list[float]:
        """Seconds by transfer: none, then forward by boundary, then backward by boundary."""
        return [0, *self.transfer_forward, *self.transfer_backward]

    def _spread(self, name: str, chunks: int) -> Sequence[float]:
        values: tuple[float, ...] = getattr(self, name)
        if chunks == self.sequence_chunks:
            return values
        return [seconds for seconds in values for _ in range(chunks)]

    def _check_length(self, name: str, length: int) -> None:
        given = len(getattr(self, name))
        if given == length:
            return
        raise LayoutError(
            f"{name} has {given} values for {self.stages} stages.",
            field=name,
            hint=f"give {length} values.",
        )

    def _check_chunks(self) -> None:
        if len(self.forward) % self.sequence_chunks:
            raise LayoutError(
                f"{len(self.forward)} values are not {self.sequence_chunks} for every stage.",
                field="sequence_chunks",
                hint="give one value per stage and sequence chunk.",
            )

    def _check_overlap(self) -> None:
        backwards = _add(self.backward_input, self.backward_weight)
        for index, (saved, *both) in enumerate(
            zip(self.overlap, self.forward, backwards, strict=True)
        ):
            if saved > min(both):
                raise LayoutError(
                    f"a pair cannot save {saved}, more than its shorter action lasts ({min(both)}).",
                    field=f"overlap[{index}]",
                    hint=f"give {min(both)} or less.",
                )


def _add(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _subtract(left: Iterable[float], right: Iterable[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def _check_times(name: str, times: Sequence[float]) -> None:
    for index, seconds in enumerate(times):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise LayoutError(
                f"a time must be finite and not negative, got {seconds}.",
                field=f"{name}[{index}]",
                hint="give 0 or more.",
            )
