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

import numpy as np

from planner.schedule.closed_forms import ZB_V_FORMS
from planner.schedule.entry import ScheduleEntry, Shape, v_placement
from planner.schedule.rows import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Row


def rank_actions(shape: Shape, rank: int) -> Row:
    """The order for enough micro-batches, without those that the step does not have."""
    enough = max(shape.micro_batches, 2 * shape.ranks - 1)
    letters = np.frombuffer(
        _order(shape.ranks, rank, enough).encode("ascii"), dtype=np.uint8
    )
    stages, kinds, units = (np.empty(len(letters), dtype=np.int64) for _ in range(3))
    for stage, alphabet in ((rank, "FIW"), (2 * shape.ranks - 1 - rank, "fiw")):
        for kind, letter in zip(
            (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT), alphabet, strict=True
        ):
            places = np.flatnonzero(letters == ord(letter))
            stages[places], kinds[places], units[places] = (
                stage,
                kind,
                np.arange(len(places)),
            )
    runs = units < shape.micro_batches
    return Row(stages[runs], kinds[runs], units[runs])


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
    forms=ZB_V_FORMS,
    aliases=("zbvzerobubble",),
    stage_ranks=v_placement,
    least_virtual_stages=2,
    most_virtual_stages=2,
    runnable=True,
)
