"""What the forward of a module changes besides what it returns: buffers, numbers that it holds, random numbers that are
not torch's.

A forward that runs again must start from what it started from, and must leave no second trace: batch normalisation
would count a micro-batch twice (torchgpipe's deferred batch norm has the same care), a moving average that the forward
divides by would be another one, so that the gradients would be those of another function. What it started from is
copied, but for the statistics of norms, which the forward of a training does not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from planner.profiler.host_random import States, restore, states

Place = tuple[nn.Module, str]
"""A module, and the name of an attribute or buffer of its own."""


class ForwardState:
    """Knows what a module's forward changes: what its first run changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.changing: list[Place] | None = None
        """None: it has not run yet."""
        self.draws = False

    def run(self) -> ForwardRun:
        """For one forward, and its second run."""
        return ForwardRun(self)

    def places(self) -> list[Place]:
        """What the forward may change."""
        return list(_places(self._module)) if self.changing is None else self.changing


class ForwardRun:
    """One forward, and its second run."""

    def __init__(self, state: ForwardState) -> None:
        self._state = state
        self._before: dict[Place, Any] = {}
        self._random: States | None = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Within, the forward runs."""
        state = self._state
        is_known = state.changing is not None
        held = {place: _value(place) for place in state.places()}
        self._before = {
            place: None if is_known and _is_statistic(place) else _copy(value)
            for place, value in held.items()
        }
        self._random = states() if state.draws or not is_known else None
        yield
        if not is_known:
            self._before = {
                place: None if _is_statistic(place) else copy
                for place, copy in self._before.items()
                if _differs(place, held[place], copy)
            }
            self._random = None if self._random == states() else self._random
            state.changing, state.draws = list(self._before), self._random is not None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, the forward runs once more, from where it began; afterwards all is as it was found."""
        found = {place: _value(place) for place in self._before}
        random = None if self._random is None else states()
        for place, value in self._before.items():
            _set(place, _copy(found[place]) if _is_statistic(place) else value)
        if self._random is not None:
            restore(self._random)
        try:
            yield
        finally:
            for place, value in found.items():
                _set(place, value)
            if random is not None:
                restore(random)


def _places(module: nn.Module) -> Iterator[Place]:
    for part in module.modules():
        plain = (
            key
            for key, value in vars(part).items()
            if isinstance(value, int | float | Tensor)
        )
        yield from ((part, key) for key in (*plain, *part._buffers))


def _value(place: Place) -> Any:
    module, key = place
    return module._buffers[key] if key in module._buffers else vars(module).get(key)


def _set(place: Place, value: Any) -> None:
    module, key = place
    (module._buffers if key in module._buffers else vars(module))[key] = value


def _is_statistic(place: Place) -> bool:
    return isinstance(place[0], _NormBase)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _differs(place: Place, held: Any, copy: Any) -> bool:
    """Is there another value now? Batch normalisation's statistics change without a new version."""
    now = _value(place)
    if isinstance(held, Tensor) and isinstance(now, Tensor):
        return now is not held or not torch.equal(now, copy)
    return bool(now is not held and now != copy)
