"""How long ranks really waited for what others sent, from the recorded actions of one step. Torch-free.

    (X1)  exposed transfer = start - max(end of the action before on this rank, end of the action that made the tensor)
          of every F whose input, and every B or I whose gradient, comes from another rank; what a rank waits before
          the tensor is made is bubble, not communication
    (X2)  exposed communication = exposed transfers + seconds in `reduce`

Collectives inside an action (tensor and context parallelism) count as the action. Clocks of ranks start together at a
barrier; what they differ by stands in (X1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from planner.spec.measured import MeasuredAction
from planner.spec.plan import Plan, RankPlacement

ACTION = re.compile(r"(?P<stage>\d+)(?P<kind>[FBIW])(?P<micro_batch>\d+)")
REDUCE = "reduce"

Replica = tuple[int, int, int]
"""Data, tensor and context coordinate: ranks that differ in the pipeline coordinate only hand tensors on."""


def exposed_seconds(plan: Plan, actions: Sequence[MeasuredAction]) -> dict[int, float]:
    """Exposed communication of every rank: equation (X2).

    Args:
        actions: of one step, those of a rank in the order in which they started.
    """
    placed = {row.rank: row for row in plan.placement}
    ends = {
        (_replica(placed[one.rank]), one.action): one.end_seconds for one in actions
    }
    rank_of = [stage.pipeline_rank for stage in plan.stages]
    exposed = dict.fromkeys(placed, 0.0)
    before = dict.fromkeys(placed, 0.0)
    for one in actions:
        if one.action == REDUCE:
            exposed[one.rank] += one.end_seconds - one.start_seconds
        made = _made(one.action, rank_of, _replica(placed[one.rank]), ends)
        if made is not None:
            exposed[one.rank] += max(
                one.start_seconds - max(before[one.rank], made), 0.0
            )
        before[one.rank] = one.end_seconds
    return exposed


def _replica(row: RankPlacement) -> Replica:
    return row.data, row.tensor, row.context


def _made(
    action: str,
    rank_of: Sequence[int],
    replica: Replica,
    ends: Mapping[tuple[Replica, str], float],
) -> float | None:
    """When another rank had made the tensor that an action needs; None: none did."""
    match = ACTION.fullmatch(action)
    if match is None or match["kind"] == "W":
        return None
    stage, micro_batch = int(match["stage"]), match["micro_batch"]
    source = stage - 1 if match["kind"] == "F" else stage + 1
    if not 0 <= source < len(rank_of) or rank_of[source] == rank_of[stage]:
        return None
    kinds = "F" if match["kind"] == "F" else "BI"
    return next(
        (
            end
            for kind in kinds
            if (end := ends.get((replica, f"{source}{kind}{micro_batch}"))) is not None
        ),
        None,
    )
