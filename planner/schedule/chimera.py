"""Chimera: two pipelines in opposite directions over the same ranks, each with half of the micro-batches.

Source: Li and Hoefler 2021, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines".
Stage s stands on rank s for the way down, and again on rank P - 1 - s for the way up; the later half of the
micro-batches goes up. The two copies of the weights must add up their gradients after the step. A unit is P
micro-batches; longer steps run one unit after the other.

P even, M a multiple of P; for one unit, M = P, uniform F and B, no transfer time:
    slots      F(m, s) = s + 2 m, B(m, s) = P + 2 m + P - 1 - s, in the order of which a rank runs both ways
    makespan   M (F + B) + (P - 2) max(F, B)
    in flight  between P / 2 + 1 (the ends) and P (the middle) micro-batches
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from planner.errors import LayoutError
from planner.schedule.actions import Action, ActionKind
from planner.schedule.closed_forms import Mask, Shapes
from planner.schedule.entry import ScheduleEntry, Shape, needs_even, opposite_ranks


def check(shape: Shape) -> None:
    """Raise `LayoutError` for an odd number of ranks, or micro-batches that make no whole units."""
    needs_even("chimera", "ranks", shape.ranks)
    if shape.micro_batches % shape.ranks:
        raise LayoutError(
            f"chimera runs units of {shape.ranks} micro-batches on {shape.ranks} ranks, got micro_batches = "
            f"{shape.micro_batches}.",
            field="micro_batches",
            hint=f"use a multiple of {shape.ranks}.",
        )


def accepts(shapes: Shapes) -> Mask:
    """Return which shapes make whole units."""
    accepted: Mask = (shapes.ranks % 2 == 0) & (
        shapes.micro_batches % shapes.ranks == 0
    )
    return accepted


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """Unit by unit, both ways merged by slot."""
    half, upwards = shape.ranks // 2, shape.micro_batches // 2
    return tuple(
        Action(stage, kind, first + unit * half + micro_batch)
        for unit in range(shape.micro_batches // shape.ranks)
        for _, stage, kind, first, micro_batch in sorted(
            slot
            for stage, first in ((rank, 0), (shape.ranks - 1 - rank, upwards))
            for slot in _slots(shape.ranks, stage, first)
        )
    )


def _slots(
    ranks: int, stage: int, first: int
) -> list[tuple[int, int, ActionKind, int, int]]:
    """(slot, stage, kind, first micro-batch of the way, micro-batch of the unit) of one way of a unit."""
    forwards = [
        (stage + 2 * m, stage, ActionKind.FORWARD, first, m) for m in range(ranks // 2)
    ]
    backwards = [
        (2 * ranks + 2 * m - 1 - stage, stage, ActionKind.BACKWARD, first, m)
        for m in range(ranks // 2)
    ]
    return forwards + backwards


CHIMERA = ScheduleEntry(
    name="chimera",
    summary="two pipelines in opposite directions: a smaller bubble for two copies of the weights",
    rank_actions=rank_actions,
    accepts=accepts,
    check=check,
    replica_ranks=opposite_ranks,
)
