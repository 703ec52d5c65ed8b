"""What a schedule's name says about a plan: where its stages stand, what ranks hold, which actions run as pairs.

Written down again from the papers and frameworks that define the schedules; the orders themselves stand in the plan.

    (V1)  loop: stage s on rank s % P; wave: down the ranks and up again in turn, of which V is the shortest
    (V2)  most units (micro-batch of a stage, or sequence chunk of it) that rank r holds from F to the end of B or W;
          schedules without a closed form promise nothing, and their memory is recomputed all the same
    (V3)  DualPipeV: a full backward right after a forward of the rank's other stage is one kernel with it, but for the
          first one on the last rank, whose input that forward makes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from planner.errors import UnknownNameError
from planner.schedule import canonical_name
from planner.spec.job import Constraint


class Shape(NamedTuple):
    """The numbers of a schedule."""

    ranks: int
    micro_batches: int
    stages_per_rank: int = 1
    chunks: int = 1
    """Pieces of every micro-batch's sequence."""


Owners = tuple[int, ...]
"""Pipeline rank of every stage."""
Held = Callable[[Shape, int], int | None]
"""Units that a rank holds at most; None: not known."""


def loop(shape: Shape) -> Owners:
    """Every chunk of stages through all ranks, from the first on (Narayanan et al. 2021, section 2.2)."""
    return tuple(
        stage % shape.ranks for stage in range(shape.ranks * shape.stages_per_rank)
    )


def wave(shape: Shape) -> Owners:
    """Down and up in turn (Liu et al. 2023, Hanayo); with two stages per rank a V (Qi et al. 2024, ZB-V)."""
    turns = [
        divmod(stage, shape.ranks)
        for stage in range(shape.ranks * shape.stages_per_rank)
    ]
    return tuple(
        shape.ranks - 1 - place if turn % 2 else place for turn, place in turns
    )


def _anything(shape: Shape, rank: int) -> None:
    return None


def _after(ahead: Callable[[Shape, int], int]) -> Held:
    """One forward, one backward, behind a warm-up of so many forwards."""

    def held(shape: Shape, rank: int) -> int:
        return min(
            shape.micro_batches * shape.stages_per_rank * shape.chunks,
            ahead(shape, rank) + 1,
        )

    return held


def _groups(micro_batches: int, size: int) -> int:
    """Micro-batches of the first of equal groups; the first ones take what is left over."""
    return -(-micro_batches // max(1, micro_batches // size))


def _ahead_of_chunks(
    groups: Callable[[Shape], int], per_rank: Callable[[Shape], int]
) -> Held:
    """Sun et al. 2024, Seq1F1B: the warm-up of the stages in between, of the ranks behind, and of the other chunks."""

    def ahead(shape: Shape, rank: int) -> int:
        first = _groups(shape.micro_batches, groups(shape)) * shape.chunks
        behind = (shape.ranks - 1 - rank) * per_rank(shape)
        return behind + (shape.stages_per_rank - 1) * first + shape.chunks - 1

    return _after(ahead)


def _all(shape: Shape, rank: int) -> int:
    return shape.micro_batches * shape.stages_per_rank


def _hanayo(shape: Shape, rank: int) -> int | None:
    is_known = shape.micro_batches >= shape.ranks
    return (shape.stages_per_rank - 1) * shape.ranks + rank + 1 if is_known else None


@dataclass(frozen=True, slots=True)
class Rules:
    """Of one schedule."""

    placements: tuple[Callable[[Shape], Owners], ...] = (loop,)
    """Equation (V1); one of them."""
    held: Held = _anything
    """Equation (V2)."""
    least_stages: int = 1
    """Per rank."""
    most_stages: int | None = 1
    """None: any number."""
    cuts_sequence: bool = False
    has_joint_pairs: bool = False
    """Equation (V3)."""
    recomputes_ahead: bool = False
    """Of some micro-batches only, while the rank waits: a stage map cannot tell what it then costs and holds."""
    refused: str = ""
    """Why no plan can be made of it; empty: it can."""


_SECOND_COPIES = "has two copies of every stage, and a plan's stage map has one"
_ONE_AHEAD = _after(lambda shape, rank: shape.ranks - 1 - rank)
RULES: dict[str, Rules] = {
    "gpipe": Rules(held=_all),
    "torchgpipe": Rules(held=_all, recomputes_ahead=True),
    "1f1b": Rules(held=_ONE_AHEAD),
    "1f1b-overlap": Rules(held=_ONE_AHEAD),
    "eager-1f1b": Rules(held=_after(lambda shape, rank: 2 * (shape.ranks - 1 - rank))),
    "interleaved-1f1b": Rules(
        held=_after(
            lambda shape, rank: (
                (shape.stages_per_rank - 1) * _groups(shape.micro_batches, shape.ranks)
                + 2 * (shape.ranks - 1 - rank)
            )
        ),
        least_stages=2,
        most_stages=None,
    ),
    "interleaved-memory-optimised": Rules(
        held=_after(
            lambda shape, rank: (
                (shape.stages_per_rank - 1)
                * (shape.ranks + shape.micro_batches % shape.ranks)
                + shape.ranks
                - 1
                - rank
            )
        ),
        least_stages=2,
        most_stages=None,
    ),
    "looped-bfs": Rules(held=_all, most_stages=None),
    "seqpipe": Rules(
        held=_ahead_of_chunks(
            lambda shape: shape.ranks,
            lambda shape: 1 if shape.stages_per_rank == 1 else 2,
        ),
        most_stages=None,
        cuts_sequence=True,
    ),
    "seqvpp": Rules(
        held=_ahead_of_chunks(
            lambda shape: shape.ranks // shape.chunks, lambda shape: 2
        ),
        least_stages=2,
        most_stages=None,
        cuts_sequence=True,
    ),
    "seqsmartvpp": Rules(
        held=_ahead_of_chunks(
            lambda shape: shape.ranks // shape.chunks, lambda shape: 1
        ),
        least_stages=2,
        most_stages=None,
        cuts_sequence=True,
    ),
    "zb-h1": Rules(
        held=lambda shape, rank: shape.ranks if shape.stages_per_rank == 1 else None,
        most_stages=None,
    ),
    "zb-h1-fused": Rules(held=lambda shape, rank: shape.ranks),
    "zb-h2": Rules(held=lambda shape, rank: 2 * shape.ranks - 1),
    "zb-v": Rules(
        placements=(wave,),
        held=lambda shape, rank: (
            2 * shape.ranks if shape.micro_batches >= 2 * shape.ranks - 1 else None
        ),
        least_stages=2,
        most_stages=2,
    ),
    "dualpipev": Rules(
        placements=(wave,),
        held=lambda shape, rank: 2 * shape.ranks + 1,
        least_stages=2,
        most_stages=2,
        has_joint_pairs=True,
    ),
    "dualpipe": Rules(refused=_SECOND_COPIES),
    "chimera": Rules(refused=_SECOND_COPIES),
    "hanayo": Rules(placements=(wave,), held=_hanayo, least_stages=2, most_stages=None),
    "pipedream": Rules(
        refused="runs backwards with stale weights: its step is not that of one model"
    ),
    "synthesized": Rules(placements=(wave, loop), most_stages=None, cuts_sequence=True),
}
"""By canonical name."""


def joint_pairs(
    schedule: str, rows: Sequence[Sequence[tuple[int, str, int]]]
) -> frozenset[tuple[int, str, int]]:
    """Actions that run as one with the action before them: equation (V3).

    Args:
        schedule: canonical name.
        rows: (stage, kind, micro-batch) of every rank's actions, in order.
    """
    rules = RULES.get(schedule)
    if rules is None or not rules.has_joint_pairs:
        return frozenset()
    beside = [list(_beside_forwards(row)) for row in rows]
    beside[-1:] = [last[1:] for last in beside[-1:]]
    return frozenset(action for row in beside for action in row)


def _beside_forwards(
    row: Sequence[tuple[int, str, int]],
) -> Iterator[tuple[int, str, int]]:
    """Full backwards right after a forward of another stage."""
    for early, late in pairwise(row):
        if (early[1], late[1]) == ("F", "B") and early[0] != late[0]:
            yield late


def permits_schedule(constraint: Constraint, schedule: str) -> bool:
    """Does a job's constraint, which may use another framework's names, permit this schedule?"""
    names = constraint if isinstance(constraint, tuple) else (constraint,)
    return any(isinstance(name, str) and _same(name, schedule) for name in names)


def _same(name: str, schedule: str) -> bool:
    try:
        return canonical_name(name) == schedule
    except UnknownNameError:
        return False
