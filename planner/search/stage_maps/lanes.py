"""Ranks that act alike, and their segments: all ranks of a layout, or, where devices differ, one column of them.

In a column of a heterogeneous cluster every pipeline rank has costs and room of its own: each row of its tables comes
from the segments of that rank's device.

    (H4)  a stage map is as slow as its slowest lane: whatever bounds one lane bounds the step, and a segment that
          overflows in one lane is in no stage map                                        -> stage_maps.inside
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from planner.cost import LayoutCosts, schedule_of
from planner.schedule import Schedule, in_flight_per_stage
from planner.search.bounds.layout import (
    BOUNDED,
    host_room_bytes,
    room_bytes,
    warm_ups,
    work_of,
)
from planner.search.engine.division import given_sizes
from planner.search.stage_maps.paths import bottleneck_bounds, segment_bounds
from planner.search.stage_maps.segments import LayerModes, Mask, Segments, Table
from planner.search.stage_maps.windows import Kinds, Windows, reach, windows_of, within
from planner.spec.profile import RecomputeMode

UNBOUNDED_BYTES = 2**55


@dataclass(frozen=True)
class RankSegments(Segments):
    """Segments whose pipeline ranks stand on different devices."""

    parts: tuple[Segments, ...] = ()
    """Runs of ranks that cost the same, in order."""

    def on_rank(self, rank: int) -> Segments:
        """The segments of this rank's device."""
        return next(part for part in self.parts if rank < part.first + part.stages)

    def _joined(self, name: str) -> Table:
        table: Table = np.concatenate([getattr(part, name) for part in self.parts])
        return table

    @cached_property
    def forward(self) -> Table:
        """F of every segment."""
        return self._joined("forward")

    @cached_property
    def tail(self) -> Table:
        """Gradient reduction and optimizer behind every segment."""
        return self._joined("tail")

    @cached_property
    def fixed_bytes(self) -> Table:
        """Bytes of every segment that no recompute choice changes."""
        return self._joined("fixed_bytes")

    @cached_property
    def least_bytes(self) -> Table:
        """Least peak of every segment over all recompute choices, reserved bytes apart."""
        return self._joined("least_bytes")

    @cached_property
    def fits(self) -> Mask:
        """Segments that have a recompute choice within their rank's capacity."""
        return self._joined("fits").astype(bool)

    @cached_property
    def backward(self) -> Table:
        """Least B of every segment that fits its memory."""
        return self._joined("backward")

    @cached_property
    def is_exact(self) -> Mask:
        """Segments whose `backward` is reached by a recompute choice that fits."""
        return self._joined("is_exact").astype(bool)

    def reprice(self, stage: int, x: int, y: int, backward: int) -> None:
        """Set the exact backward of one segment, and the tail that follows from it."""
        part = self.on_rank(stage)
        row = stage - part.first
        part.reprice(row, x, y, backward)
        self.backward[stage, x, y] = part.backward[row, x, y]
        self.is_exact[stage, x, y] = False
        self.__dict__.pop("tail", None)

    def uniform_modes(
        self, stage: int, x: int, y: int
    ) -> tuple[tuple[int, RecomputeMode], ...] | None:
        """The modes behind `backward` where it is exact; None otherwise."""
        part = self.on_rank(stage)
        return (
            part.uniform_modes(stage - part.first, x, y)
            if self.is_exact[stage, x, y]
            else None
        )


@dataclass(frozen=True, eq=False)
class Lane:
    """Ranks that act alike."""

    costs: LayoutCosts
    segments: Segments

    @classmethod
    def of(
        cls,
        costs: LayoutCosts,
        modes: tuple[LayerModes, ...],
        windows: Windows,
        *,
        must_fit: bool = True,
    ) -> Lane:
        """A lane by its costs.

        Args:
            costs: of the layout, or of one of its columns.
            modes: allowed recompute choices of every layer; in a column they stand for those of its ranks.
            windows: where ranks can start.
            must_fit: keep every stage within its device's memory, and its host's.
        """
        units, room = (
            in_flight(costs),
            room_bytes(costs) if must_fit else UNBOUNDED_BYTES,
        )
        if not costs.ranks:
            host = host_room_bytes(costs) if must_fit else None
            return cls(
                costs,
                Segments(costs, modes, units, room, windows, host_room_bytes=host),
            )
        parts, behind = [], 0
        for _, run in groupby(costs.ranks, key=lambda rank: id(rank.layers)):
            first, same = behind, list(run)
            behind += len(same)
            own = room_bytes(same[0]) if must_fit else UNBOUNDED_BYTES
            choices, window = modes_on(same[0], modes), windows.of_ranks(first, behind)
            host = host_room_bytes(same[0]) if must_fit else None
            parts.append(
                Segments(
                    same[0],
                    choices,
                    units[first:behind],
                    own,
                    window,
                    first,
                    host_room_bytes=host,
                )
            )
        return cls(
            costs, RankSegments(costs, modes, units, room, windows, parts=tuple(parts))
        )

    @cached_property
    def schedule(self) -> Schedule:
        """Built only when a stage map is simulated: most layouts are excluded by their bounds before."""
        return schedule_of(self.costs)

    def bounds(self, open_: Mask) -> Table:
        """No stage map that holds a segment is faster: equation (H3), or its work alone."""
        count = self.costs.micro_batches
        if self.costs.layout.schedule in BOUNDED:
            return segment_bounds(self.segments, open_, warm_ups(self.costs), count)
        return count * (self.segments.forward + self.segments.backward)

    def bottleneck_bounds(self, open_: Mask) -> Table:
        """The same of gpipe or 1f1b by the dearest rank, which takes longer to tell: equation (H6)."""
        numbers = warm_ups(self.costs), self.costs.micro_batches
        return bottleneck_bounds(
            self.segments,
            open_,
            *numbers,
            is_gpipe=self.costs.layout.schedule == "gpipe",
        )


def lanes_of(
    costs: LayoutCosts,
    modes: tuple[LayerModes, ...],
    windows: Windows,
    *,
    must_fit: bool = True,
) -> tuple[Lane, ...]:
    """All lanes of a layout."""
    return tuple(
        Lane.of(each, modes, windows, must_fit=must_fit)
        for each in costs.columns or (costs,)
    )


def windows_on(
    costs: LayoutCosts,
    modes: tuple[LayerModes, ...],
    limit_ticks: int,
    *,
    must_fit: bool = True,
) -> Windows:
    """Where ranks can start in stage maps that fit, take fewer ticks than the limit, and are divided as the job fixes
    it; in every lane."""

    def room(own: LayoutCosts) -> int:
        return room_bytes(own) if must_fit else UNBOUNDED_BYTES

    kinds, sizes = (
        Kinds.of(modes),
        given_sizes(costs.work, costs.layout.pipeline_parallel_degree),
    )
    if not costs.columns:
        return windows_of(
            costs, kinds, in_flight(costs), room(costs), limit_ticks
        ).only(sizes)
    passing = kinds.sums([work_of(options)[0] for options in kinds.options])
    lanes = []
    for column in costs.columns:
        units, known = (
            in_flight(column),
            {id(rank.layers): rank for rank in column.ranks},
        )
        reached = {
            key: reach(
                own,
                Kinds.of(modes_on(own, modes)),
                units,
                room(own),
                limit_ticks,
                passing=passing,
            )
            for key, own in known.items()
        }
        lanes.append(
            [reached[id(own.layers)][rank] for rank, own in enumerate(column.ranks)]
        )
    return within(
        [np.minimum.reduce(each) for each in zip(*lanes, strict=True)], len(modes)
    ).only(sizes)


def in_flight(costs: LayoutCosts) -> tuple[int, ...]:
    """Most micro-batches that every rank holds at once; told without building the schedule where that is possible."""
    if costs.layout.schedule in BOUNDED:
        return warm_ups(costs)
    return in_flight_per_stage(schedule_of(costs))


def modes_on(rank: LayoutCosts, modes: Sequence[LayerModes]) -> tuple[LayerModes, ...]:
    """The same choices at this rank's costs; identical layers share them."""
    place = (id(rank.layers), id(modes))
    if place in _known:
        return _known[place][0]
    known: dict[tuple[int, int], LayerModes] = {}
    result = []
    for options, allowed in zip(rank.layers, modes, strict=True):
        key = (id(options), id(allowed))
        if key not in known:
            known[key] = tuple(options[cost.mode] for cost in allowed)
        result.append(known[key])
    if len(_known) >= _KEPT:
        _known.clear()
    _known[place] = tuple(result), (rank.layers, modes)
    return _known[place][0]


_KEPT = 1024
_known: dict[tuple[int, int], tuple[tuple[LayerModes, ...], object]] = {}
"""By identity, with what it is the identity of."""
