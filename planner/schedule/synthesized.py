"""Synthesised: the best order for given durations, which only a search can tell.

The name stands in the catalogue, so that it is known wherever a schedule is named. Unlike all others it is no function
of ranks and micro-batches alone: `planner.schedule.synthesize` makes it from durations and a memory limit, and a plan
that uses it carries its actions.
"""

from __future__ import annotations

from planner.errors import LayoutError
from planner.schedule.actions import Action
from planner.schedule.entry import ScheduleEntry, Shape

NAME = "synthesized"


def check(shape: Shape) -> None:
    """Raise `LayoutError`: numbers do not make this schedule."""
    raise LayoutError(
        f"{NAME} is an order for given durations, which ranks({shape.ranks}) and micro_batches({shape.micro_batches}) "
        "do not tell.",
        field="schedule",
        hint="call synthesize(durations, ...), or take the actions of the plan that uses it.",
    )


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """None: `check` refuses before."""
    return ()


SYNTHESIZED = ScheduleEntry(
    name=NAME,
    summary="the best order for unequal stages, transfers and a memory limit, by CP-SAT, with its proof",
    rank_actions=rank_actions,
    aliases=("synthesised", "cpsat"),
    check=check,
    most_virtual_stages=None,
    takes_sequence_chunks=True,
    needs_durations=True,
    runnable=True,
)
