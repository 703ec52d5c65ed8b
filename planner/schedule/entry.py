"""What one schedule tells about itself; every file of a schedule ends with its entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.errors import LayoutError
from planner.schedule.actions import Action, Schedule


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers that a schedule is built from."""

    ranks: int
    micro_batches: int
    virtual_stages: int = 1
    sequence_chunks: int = 1


def loop_placement(shape: Shape) -> tuple[int, ...]:
    """Stage ``chunk * ranks + r`` on rank ``r``: every chunk runs through all ranks (Megatron-LM, torch)."""
    return tuple(range(shape.ranks)) * shape.virtual_stages


def v_placement(shape: Shape) -> tuple[int, ...]:
    """Down and up again: rank ``r`` has stages ``r`` and ``2 * ranks - 1 - r``, so that the loss is on rank 0.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"; torch's ScheduleZBVZeroBubble.
    """
    return (*range(shape.ranks), *reversed(range(shape.ranks)))


def any_shape(shape: Shape) -> None:
    """The check of schedules that take any numbers."""


def needs_micro_batches(name: str, shape: Shape, least: int, because: str) -> None:
    """Raise `LayoutError` unless there are at least so many micro-batches."""
    if shape.micro_batches >= least:
        return
    raise LayoutError(
        f"{name} on {shape.ranks} ranks needs micro_batches >= {because} = {least}, got {shape.micro_batches}.",
        field="micro_batches",
        mend=f"use at least {least} micro-batches, fewer pipeline ranks, or 1f1b, which takes any number.",
    )


@dataclass(frozen=True, slots=True)
class ScheduleEntry:
    """A schedule by name: who may use it, and how it is built."""

    name: str
    summary: str
    rank_actions: Callable[[Shape, int], tuple[Action, ...]]
    """The ordered actions of one pipeline rank."""
    aliases: tuple[str, ...] = ()
    """Names in other frameworks, lower case, without ``-`` and ``_``."""
    stage_ranks: Callable[[Shape], tuple[int, ...]] = loop_placement
    check: Callable[[Shape], None] = any_shape
    """Raises `LayoutError` for numbers that the schedule cannot take."""
    least_virtual_stages: int = 1
    most_virtual_stages: int | None = 1
    """None: any number."""
    takes_sequence_chunks: bool = False
    runnable: bool = False
    """The executor runs it; the others are for simulation."""

    def build(self, shape: Shape) -> Schedule:
        """The schedule of these numbers.

        Raises:
            LayoutError: the schedule does not take them.
        """
        self._check_virtual_stages(shape.virtual_stages)
        self._check_sequence_chunks(shape.sequence_chunks)
        self.check(shape)
        return Schedule(
            name=self.name,
            ranks=shape.ranks,
            micro_batches=shape.micro_batches,
            virtual_stages=shape.virtual_stages,
            sequence_chunks=shape.sequence_chunks,
            stage_ranks=self.stage_ranks(shape),
            actions=tuple(self.rank_actions(shape, rank) for rank in range(shape.ranks)),
        )

    def _check_virtual_stages(self, given: int) -> None:
        least, most = self.least_virtual_stages, self.most_virtual_stages
        if given >= least and (most is None or given <= most):
            return
        wanted = f"{least} or more" if most is None else f"exactly {least}"
        raise LayoutError(
            f"{self.name} puts {wanted} stages on every pipeline rank, got virtual_stages({given}).",
            field="virtual_stages",
            mend=f"use virtual_stages={least}, or another schedule (several stages per rank: interleaved-1f1b).",
        )

    def _check_sequence_chunks(self, given: int) -> None:
        if given == 1 or self.takes_sequence_chunks:
            return
        raise LayoutError(
            f"{self.name} does not cut the sequence, got sequence_chunks({given}).",
            field="sequence_chunks",
            mend="use sequence_chunks=1.",
        )
