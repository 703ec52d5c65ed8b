"""Runs of identical layers: what the solver's model counts instead of placing every layer by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost import LayerCost, LayoutCosts
from planner.spec.profile import RecomputeMode

LayerModes = tuple[LayerCost, ...]
"""The allowed recompute choices of one layer, from least to most recomputation."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers that cost the same."""

    start: int
    length: int
    modes: LayerModes

    @property
    def layers(self) -> range:
        """Indices of its layers."""
        return range(self.start, self.start + self.length)


def allowed_modes(costs: LayoutCosts, recompute: Sequence[RecomputeMode | str]) -> tuple[LayerModes, ...]:
    """Choices of every layer under a recompute wish: ``none``, ``full``, or ``per-layer`` for any mix.

    A layer that does not offer the wished mode (an embedding has nothing to recompute) keeps those it has.
    """
    seen: dict[int, LayerModes] = {}
    result = []
    for options in costs.layers:
        if id(options) not in seen:
            wished = tuple(cost for mode, cost in options.items() if "per-layer" in recompute or mode in recompute)
            seen[id(options)] = wished or tuple(options.values())
        result.append(seen[id(options)])
    return tuple(result)


def runs_of(costs: LayoutCosts, modes: Sequence[LayerModes]) -> tuple[Run, ...]:
    """Cut the layers into maximal runs. A layer that shares parameters or ends a skip stands alone."""
    alone = {layer for shared in costs.shared for layer in shared.layers}
    alone |= {layer for skip in costs.skips for layer in (skip.producer, skip.consumer)}
    runs: list[Run] = []
    for index, options in enumerate(modes):
        last = runs[-1] if runs else None
        if last and index not in alone and last.start not in alone and last.modes == options:
            runs[-1] = Run(last.start, last.length + 1, options)
        else:
            runs.append(Run(index, 1, options))
    return tuple(runs)
