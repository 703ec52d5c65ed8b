"""How long actions and transfers last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from planner.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Durations:
    """Time of every kind of action by stage, and of every transfer by stage boundary.

    Any consistent unit of time will do, seconds by convention. Whole numbers stay whole, so that results are exact.
    A full backward lasts ``recompute + backward_input + backward_weight``, a split input gradient
    ``recompute + backward_input``. Boundary ``s`` lies between stage ``s`` and ``s + 1``.

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

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name, length in (
            ("backward_input", stages),
            ("backward_weight", stages),
            ("recompute", stages),
            ("transfer_forward", stages - 1),
            ("transfer_backward", stages - 1),
        ):
            if name not in ("backward_input", "backward_weight") and not getattr(self, name):
                object.__setattr__(self, name, (0,) * length)
            self._check_length(name, length)
        for name in self.__dataclass_fields__:
            _check_times(name, getattr(self, name))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.forward)

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
    ) -> Self:
        """The same for every stage and boundary."""
        return cls(
            forward=(forward,) * stages,
            backward_input=(backward_input,) * stages,
            backward_weight=(backward_weight,) * stages,
            recompute=(recompute,) * stages,
            transfer_forward=(transfer,) * (stages - 1),
            transfer_backward=(transfer,) * (stages - 1),
        )

    def of_actions(self) -> list[float]:
        """Seconds by ``kind * stages + stage``, the kinds in the order F, B, I, W."""
        parts = (self.recompute, self.backward_input, self.backward_weight)
        backward = map(sum, zip(*parts, strict=True))
        backward_input = map(sum, zip(*parts[:2], strict=True))
        return [*self.forward, *backward, *backward_input, *self.backward_weight]

    def of_transfers(self) -> list[float]:
        """Seconds by transfer: none, then forward by boundary, then backward by boundary."""
        return [0, *self.transfer_forward, *self.transfer_backward]

    def _check_length(self, name: str, length: int) -> None:
        given = len(getattr(self, name))
        if given == length:
            return
        raise LayoutError(
            f"{name} has {given} values for {self.stages} stages.", field=name, mend=f"give {length} values."
        )


def _check_times(name: str, times: Sequence[float]) -> None:
    for index, seconds in enumerate(times):
        if not (math.isfinite(seconds) and seconds >= 0):
            raise LayoutError(
                f"a time must be finite and not negative, got {seconds}.",
                field=f"{name}[{index}]",
                mend="give 0 or more.",
            )
