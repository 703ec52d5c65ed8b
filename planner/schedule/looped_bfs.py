"""Looped BFS: breadth first, a rank finishes a chunk for all micro-batches before it touches the next.

Source: Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism"; torch's ScheduleLoopedBFS. Made for sharded parameters:
each stage is gathered once forward and once backward.

P ranks, V stages per rank, M >= P micro-batches, uniform F and B of one rank, no transfer time:
    makespan   M (F + B) + (P - 1) (F + B) / V
    in flight  M V units of 1 / V micro-batch
    transfers  2 M (P V - 1)
"""

from __future__ import annotations

from planner.schedule.closed_forms import FORWARDS_FIRST
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.rows import Row
from planner.schedule.warm_up import grouped_units, one_forward_one_backward


def rank_actions(shape: Shape, rank: int) -> Row:
    """All forwards chunk by chunk, then all backwards in reverse, micro-batches too."""
    forwards, _ = grouped_units(shape, rank, (shape.micro_batches,))
    return one_forward_one_backward(
        forwards, forwards.reversed(), warm_up=len(forwards)
    )


LOOPED_BFS = ScheduleEntry(
    name="looped-bfs",
    summary="all micro-batches through one stage of a rank before its next: gathers sharded parameters least often",
    rank_actions=rank_actions,
    forms=FORWARDS_FIRST,
    aliases=("loopedbfs", "breadthfirst", "bfs"),
    most_virtual_stages=None,
    runnable=True,
)
