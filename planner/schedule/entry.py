"""What one schedule tells about itself; every file of a schedule ends with its entry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from planner.errors import LayoutError
from planner.schedule.actions import Action, Schedule
from planner.schedule.closed_forms import ClosedForms, Mask, Place, Shapes
from planner.schedule.fill import StageTimes, Times, least_makespan
from planner.schedule.rows import Numbers


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that a schedule is built from."""

    ranks: int
    micro_batches: int
    virtual_stages: int = 1
    sequence_chunks: int = 1
    recompute: str = ""
    """Which micro-batches run their forward again, for schedules that place it; empty: the others."""

    @property
    def units(self) -> int:
        """Forwards of all stages together."""
        return (
            self.ranks * self.micro_batches * self.virtual_stages * self.sequence_chunks
        )


def loop_placement(shape: Shape) -> tuple[int, ...]:
    """Stage ``chunk * ranks + r`` on rank ``r``: every chunk runs through all ranks (Megatron-LM, torch)."""
    return tuple(range(shape.ranks)) * shape.virtual_stages


def v_placement(shape: Shape) -> tuple[int, ...]:
    """Down and up again: rank ``r`` has stages ``r`` and ``2 * ranks - 1 - r``, so that the loss is on rank 0.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"; torch's ScheduleZBVZeroBubble.
    """
    return (*range(shape.ranks), *reversed(range(shape.ranks)))


def wave_placement(shape: Shape) -> tuple[int, ...]:
    """Down and up in turn, one way per virtual stage: a V, a W, ... (Liu et al. 2023, Hanayo)."""
    down = tuple(range(shape.ranks))
    return tuple(
        rank
        for way in range(shape.virtual_stages)
        for rank in (down[::-1] if way % 2 else down)
    )


def no_copies(shape: Shape) -> tuple[int, ...]:
    """Every stage is on one rank."""
    return ()


def opposite_ranks(shape: Shape) -> tuple[int, ...]:
    """A second copy of stage s on rank ``ranks - 1 - s``, for a pipeline in the other direction (Chimera, DualPipe)."""
    return tuple(reversed(range(shape.ranks)))


def no_pairs(shape: Shape, rank: int) -> tuple[Action, ...]:
    """No action overlaps with another one of its rank."""
    return ()


def recompute_inside(shape: Shape) -> None:
    """Whatever is recomputed is recomputed inside the backward."""


def any_shape(shape: Shape) -> None:
    """The check of schedules that take any numbers."""


def accept_all(shapes: Shapes) -> Mask:
    """Every shape is accepted."""
    return shapes.ranks > 0


def needs_even(name: str, field: str, value: int) -> None:
    """Raise `LayoutError` for an odd number."""
    if value % 2 == 0:
        return
    raise LayoutError(
        f"{name} needs an even number of {field.replace('_', ' ')}, got {value}.",
        field=field,
        hint=f"use {value + 1}, or another schedule.",
    )


def needs_micro_batches(name: str, shape: Shape, least: int, because: str) -> None:
    """Raise `LayoutError` unless there are at least so many micro-batches."""
    if shape.micro_batches >= least:
        return
    raise LayoutError(
        f"{name} on {shape.ranks} ranks needs micro_batches >= {because} = {least}, got {shape.micro_batches}.",
        field="micro_batches",
        hint=f"use at least {least} micro-batches, fewer pipeline ranks, or 1f1b, which takes any number.",
    )


def _dimensions(*values: ArrayLike) -> int:
    return max(np.ndim(value) for value in values)


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """A schedule by name: who may use it, and how it is built."""

    name: str
    summary: str
    rank_actions: Callable[[Shape, int], Sequence[Action]]
    """The ordered actions of one pipeline rank."""
    aliases: tuple[str, ...] = ()
    """Names in other frameworks, lower case, without ``-`` and ``_``."""
    stage_ranks: Callable[[Shape], tuple[int, ...]] = loop_placement
    check: Callable[[Shape], None] = any_shape
    """Raises `LayoutError` for numbers that the schedule cannot take."""
    accepts: Callable[[Shapes], Mask] = accept_all
    """Which shapes `check` does not refuse."""
    forms: ClosedForms | None = None
    """Units by local stage without building the schedule; None: build it."""
    least_virtual_stages: int = 1
    most_virtual_stages: int | None = 1
    """None: any number."""
    takes_sequence_chunks: bool = False
    replica_ranks: Callable[[Shape], tuple[int, ...]] = no_copies
    """Pipeline rank of each stage's second copy."""
    paired: Callable[[Shape, int], Iterable[Action]] = no_pairs
    """Actions of a rank that overlap with the action before them."""
    joint_pairs: bool = False
    """`Schedule.joint_pairs`."""
    recompute_modes: tuple[str, ...] = ()
    """Which micro-batches recompute ahead of their backward, the default first; empty: the schedule leaves it open."""
    recompute_stop: Callable[[Shape], int | None] = recompute_inside
    """`Schedule.recompute_stop` of these numbers."""
    is_asynchronous: bool = False
    """Steps follow without a flush, and backwards use stashed weights: not the gradient of one model."""
    needs_durations: bool = False
    """Its order follows from durations: `planner.schedule.synthesize` makes it, `build` does not."""
    runnable: bool = False
    """The executor runs it; the others are for simulation."""

    @property
    def has_pairs(self) -> bool:
        """Do some of its actions overlap with the one before?"""
        return self.paired is not no_pairs

    def takes_virtual_stages(self, given: int) -> bool:
        """May every rank have so many stages?"""
        most = self.most_virtual_stages
        return given >= self.least_virtual_stages and (most is None or given <= most)

    def valid(self, p: ArrayLike, m: ArrayLike, v: ArrayLike, q: ArrayLike) -> Mask:
        """Return which shapes `build` accepts.

        Args:
            p: pipeline ranks, 1 or more.
            m: micro-batches, 1 or more.
            v: stages per rank, 1 or more.
            q: sequence chunks, 1 or more.
        """
        shapes = Shapes.of(p, m, v, q)
        stages, chunks = shapes.virtual_stages, shapes.sequence_chunks
        takes_stages = stages >= self.least_virtual_stages
        if self.most_virtual_stages is not None:
            takes_stages = takes_stages & (stages <= self.most_virtual_stages)
        takes_chunks = (chunks == 1) | self.takes_sequence_chunks
        takes_order = self.accepts(shapes) & (not self.needs_durations)
        accepted: Mask = takes_stages & takes_chunks & takes_order
        return accepted

    def held_by_stage(
        self,
        p: ArrayLike,
        m: ArrayLike,
        v: ArrayLike,
        q: ArrayLike,
        r: ArrayLike,
        k: ArrayLike,
    ) -> Numbers | None:
        """Return the resident units of local stage `k` of rank `r` at the rank's first peak; None: build instead.

        The rank really has these numbers resident at one moment, so the sum of units x bytes over its local stages is
        a lower bound on its peak whatever the bytes of its stages, and the peak itself where all stages have the same.
        Zero for `k` >= `v`. Only meaningful for `valid` shapes.
        """
        if self.forms is None:
            return None
        rank, stage = np.asarray(r, dtype=np.int64), np.asarray(k, dtype=np.int64)
        place = Place(Shapes.of(p, m, v, q), rank, stage)
        return np.where(stage < place.shapes.virtual_stages, self.forms.held(place), 0)

    def held(
        self, p: ArrayLike, m: ArrayLike, v: ArrayLike, q: ArrayLike, r: ArrayLike
    ) -> Numbers | None:
        """Return the resident units of rank `r` at its peak, as `in_flight` of the built schedule; None: build."""
        if self.forms is None:
            return None
        stages = np.arange(np.max(v, initial=1)).reshape(
            -1, *(1,) * _dimensions(p, m, v, q, r)
        )
        by_stage = self.held_by_stage(p, m, v, q, r, stages)
        assert by_stage is not None
        units: Numbers = by_stage.sum(axis=0)
        return units

    def least_makespan(
        self, p: int, m: ArrayLike, v: int, q: int, times: StageTimes
    ) -> Times | None:
        """Return a lower bound on the makespan of each row, [row]; None: no closed form.

        Admissible for any durations and transfers: see `planner.schedule.fill`.

        Args:
            p: pipeline ranks.
            m: micro-batches, one number or one per row.
            v: stages per rank.
            q: sequence chunks.
            times: of the stages, one row per stage map.
        """
        if self.forms is None:
            return None
        return least_makespan(
            self.forms, self.stage_ranks(Shape(p, 1, v, q)), q, np.asarray(m), times
        )

    def build(self, shape: Shape) -> Schedule:
        """The schedule of these numbers.

        Raises:
            LayoutError: the schedule does not take them.
        """
        self._check_virtual_stages(shape.virtual_stages)
        self._check_sequence_chunks(shape.sequence_chunks)
        shape = self._with_recompute(shape)
        self.check(shape)
        return Schedule(
            name=self.name,
            ranks=shape.ranks,
            micro_batches=shape.micro_batches,
            virtual_stages=shape.virtual_stages,
            sequence_chunks=shape.sequence_chunks,
            stage_ranks=self.stage_ranks(shape),
            actions=tuple(
                self.rank_actions(shape, rank) for rank in range(shape.ranks)
            ),
            replica_ranks=self.replica_ranks(shape),
            paired=frozenset(
                action
                for rank in range(shape.ranks)
                for action in self.paired(shape, rank)
            ),
            joint_pairs=self.joint_pairs,
            recompute_stop=self.recompute_stop(shape),
        )

    def _with_recompute(self, shape: Shape) -> Shape:
        if not shape.recompute:
            return (
                replace(shape, recompute=self.recompute_modes[0])
                if self.recompute_modes
                else shape
            )
        if shape.recompute in self.recompute_modes:
            return shape
        known = (
            f"use one of {', '.join(self.recompute_modes)}."
            if self.recompute_modes
            else "leave it out."
        )
        raise LayoutError(
            f"{self.name} does not recompute {shape.recompute!r}.",
            field="recompute",
            hint=known,
        )

    def _check_virtual_stages(self, given: int) -> None:
        if self.takes_virtual_stages(given):
            return
        least, most = self.least_virtual_stages, self.most_virtual_stages
        wanted = f"{least} or more" if most is None else f"exactly {least}"
        raise LayoutError(
            f"{self.name} puts {wanted} stages on every pipeline rank, got virtual_stages({given}).",
            field="virtual_stages",
            hint=f"use virtual_stages={least}, or another schedule (several stages per rank: interleaved-1f1b).",
        )

    def _check_sequence_chunks(self, given: int) -> None:
        if given == 1 or self.takes_sequence_chunks:
            return
        raise LayoutError(
            f"{self.name} does not cut the sequence, got sequence_chunks({given}).",
            field="sequence_chunks",
            hint="use sequence_chunks=1.",
        )
