"""What the name of a schedule implies, as its paper or framework defines it.

    (V1)  loop: stage s is on rank s % P; wave: down the ranks and up again in turn; with
          two stages per rank this is a V
    (V2)  most units (micro-batches of a stage, or sequence chunks) that rank r holds;
          a schedule without a closed form implies nothing
    (V3)  DualPipeV: a full backward right after a forward of the rank's other stage runs
          as one kernel with it, except for the first one on the last rank

The order of the actions is in the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from planner.check.replay import Action, Actions
from planner.errors import UnknownNameError
from planner.schedule import canonical_name
from planner.spec.job import Constraint


class Shape(NamedTuple):
    """Sizes of a schedule."""

    ranks: int
    micro_batches: int
    stages_per_rank: int = 1
    chunks: int = 1

    @property
    def units(self) -> int:
        """Units that a rank processes."""
        return self.micro_batches * self.stages_per_rank * self.chunks


Owners = tuple[int, ...]
"""Pipeline rank of every stage."""


def loop(shape: Shape) -> Owners:
    """Return the ranks of stages that loop over them (Narayanan et al. 2021)."""
    return tuple(range(shape.ranks)) * shape.stages_per_rank


def wave(shape: Shape) -> Owners:
    """Return the ranks of stages in a wave (Liu et al. 2023, Hanayo)."""
    down = tuple(range(shape.ranks))
    turns = [down[::-1] if turn % 2 else down for turn in range(shape.stages_per_rank)]
    return sum(turns, ())


def _unknown(shape: Shape, rank: int) -> None:
    return None


def _all(shape: Shape, rank: int) -> int:
    return shape.units


def _after(warm_up: Callable[[Shape, int], int]) -> Callable[[Shape, int], int]:
    """Return the units of 1F1B after so many warm-up forwards."""
    return lambda shape, rank: min(shape.units, warm_up(shape, rank) + 1)


def _following(shape: Shape, rank: int) -> int:
    """Return the number of ranks after this one."""
    return shape.ranks - 1 - rank


def _first_group(shape: Shape, size: int) -> int:
    """Return the micro-batches of the first of equal groups."""
    groups = max(1, shape.micro_batches // size)
    return -(-shape.micro_batches // groups)


def _interleaved(shape: Shape, rank: int) -> int:
    others = (shape.stages_per_rank - 1) * _first_group(shape, shape.ranks)
    return others + 2 * _following(shape, rank)


def _memory_optimised(shape: Shape, rank: int) -> int:
    group = shape.ranks + shape.micro_batches % shape.ranks
    return (shape.stages_per_rank - 1) * group + _following(shape, rank)


def _of_chunks(shape: Shape, rank: int, group: int, per_rank: int) -> int:
    """Return the warm-up of chunked schedules (Sun et al. 2024, Seq1F1B)."""
    units = _first_group(shape, group) * shape.chunks
    warm_up = (shape.stages_per_rank - 1) * units + shape.chunks - 1
    return warm_up + per_rank * _following(shape, rank)


def _seqpipe(shape: Shape, rank: int) -> int:
    return _of_chunks(shape, rank, shape.ranks, min(2, shape.stages_per_rank))


def _seqvpp(shape: Shape, rank: int) -> int:
    return _of_chunks(shape, rank, shape.ranks // shape.chunks, 2)


def _seqsmartvpp(shape: Shape, rank: int) -> int:
    return _of_chunks(shape, rank, shape.ranks // shape.chunks, 1)


def _zb_h1(shape: Shape, rank: int) -> int | None:
    return shape.ranks if shape.stages_per_rank == 1 else None


def _zb_v(shape: Shape, rank: int) -> int | None:
    is_known = shape.micro_batches >= 2 * shape.ranks - 1
    return 2 * shape.ranks if is_known else None


def _hanayo(shape: Shape, rank: int) -> int | None:
    held = (shape.stages_per_rank - 1) * shape.ranks + rank + 1
    return held if shape.micro_batches >= shape.ranks else None


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """What the name of one schedule implies."""

    in_flight: Callable[[Shape, int], int | None] = _unknown
    """Equation (V2), by rank."""
    placements: tuple[Callable[[Shape], Owners], ...] = (loop,)
    """Equation (V1): one of these."""
    least_stages: int = 1
    """Per rank."""
    most_stages: int | None = 1
    """None: unlimited."""
    cuts_sequence: bool = False
    has_joint_pairs: bool = False
    """Equation (V3)."""
    recomputes_ahead: bool = False
    """It recomputes some micro-batches itself, so that layers recompute nothing."""
    refused: str = ""
    """Why no plan can have it; empty: it can."""


_COPIES = "has two copies of every stage, and a plan's stage map has one"
_STALE = "runs backwards with stale weights: its step is not that of one model"
_1F1B = ScheduleRule(_after(_following))
SCHEDULES: dict[str, ScheduleRule] = {
    "gpipe": ScheduleRule(_all),
    "torchgpipe": ScheduleRule(_all, recomputes_ahead=True),
    "1f1b": _1F1B,
    "1f1b-overlap": _1F1B,
    "eager-1f1b": ScheduleRule(_after(lambda shape, rank: 2 * _following(shape, rank))),
    "interleaved-1f1b": ScheduleRule(_after(_interleaved), (loop,), 2, None),
    "interleaved-memory-optimised": ScheduleRule(
        _after(_memory_optimised), (loop,), 2, None
    ),
    "looped-bfs": ScheduleRule(_all, (loop,), 1, None),
    "seqpipe": ScheduleRule(_after(_seqpipe), (loop,), 1, None, cuts_sequence=True),
    "seqvpp": ScheduleRule(_after(_seqvpp), (loop,), 2, None, cuts_sequence=True),
    "seqsmartvpp": ScheduleRule(
        _after(_seqsmartvpp), (loop,), 2, None, cuts_sequence=True
    ),
    "zb-h1": ScheduleRule(_zb_h1, (loop,), 1, None),
    "zb-h1-fused": ScheduleRule(lambda shape, rank: shape.ranks),
    "zb-h2": ScheduleRule(lambda shape, rank: 2 * shape.ranks - 1),
    "zb-v": ScheduleRule(_zb_v, (wave,), 2, 2),
    "dualpipev": ScheduleRule(
        lambda shape, rank: 2 * shape.ranks + 1, (wave,), 2, 2, has_joint_pairs=True
    ),
    "dualpipe": ScheduleRule(refused=_COPIES),
    "chimera": ScheduleRule(refused=_COPIES),
    "hanayo": ScheduleRule(_hanayo, (wave,), 2, None),
    "pipedream": ScheduleRule(refused=_STALE),
    "synthesized": ScheduleRule(_unknown, (wave, loop), 1, None, cuts_sequence=True),
}
"""By canonical name."""


def joint_pairs(schedule: str, actions: Actions) -> frozenset[Action]:
    """Return the actions that run as one with the action before them: (V3)."""
    found: list[Action] = []
    if not SCHEDULES.get(schedule, _1F1B).has_joint_pairs:
        return frozenset()
    for rank, row in enumerate(actions):
        joint = [
            late
            for early, late in pairwise(row)
            if early.kind == "F" and late.kind == "B" and early.stage != late.stage
        ]
        is_last = rank == len(actions) - 1
        found += joint[1:] if is_last else joint
    return frozenset(found)


def permits_schedule(constraint: Constraint, schedule: str) -> bool:
    """Return whether a job's constraint permits a schedule, under any of its names."""
    names = constraint if isinstance(constraint, tuple) else (constraint,)
    for name in names:
        try:
            if isinstance(name, str) and canonical_name(name) == schedule:
                return True
        except UnknownNameError:
            continue
    return False
