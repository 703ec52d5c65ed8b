"""ZB-V: two stages per rank in a V, split backwards; the memory of 1F1B's first rank, and no bubble between steps.

Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", with the action order of torch's
ScheduleZBVZeroBubble. The order is made for at least 2 P - 1 micro-batches; with fewer it is the same order, cut.

P ranks, M >= 2 P - 1 micro-batches, stages with equal f = i = w (half a rank's), no transfer time:
    span       6 M f
    makespan   6 M f + (P - 1) f
    in flight  2 P units of half a micro-batch on every rank
    transfers  4 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.actions import Action, ActionKind, actions_of
from planner.schedule.entry import ScheduleEntry, Shape, v_placement


def rank_actions(shape: Shape, rank: int) -> tuple[Action, ...]:
    """The order for enough micro-batches, without those that the step does not have."""
    enough = max(shape.micro_batches, 2 * shape.ranks - 1)
    following = {}
    for stage, letters in ((rank, "FIW"), (2 * shape.ranks - 1 - rank, "fiw")):
        units = [(stage, micro_batch) for micro_batch in range(enough)]
        for letter in letters:
            following[letter] = iter(actions_of(ActionKind(letter.upper()), units)).__next__
    actions = [following[letter]() for letter in _order(shape.ranks, rank, enough)]
    return tuple([action for action in actions if action.micro_batch < shape.micro_batches])


def _order(ranks: int, rank: int, micro_batches: int) -> str:
    """Kinds in capitals on the way down, in small letters on the way up; each counts its micro-batches up from 0."""
    behind = ranks - rank
    warm_up = "F" * (2 * behind - 1) + "fF" * rank + "fiw" * behind
    steady = "FIWfiw" * (micro_batches - ranks - behind + 1) + "IWfiw" * (behind - 1)
    cool_down = "Ii" * rank + "IW" * behind + "w" * rank + "W" * rank
    return warm_up + steady + cool_down


ZB_V = ScheduleEntry(
    name="zb-v",
    summary="two stages per rank in a V with split backwards: the memory of 1f1b's first rank, hardly any bubble",
    rank_actions=rank_actions,
    aliases=("zbvzerobubble",),
    stage_ranks=v_placement,
    least_virtual_stages=2,
    most_virtual_stages=2,
    runnable=True,
)
