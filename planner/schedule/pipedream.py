"""PipeDream: asynchronous 1F1B; steps follow without a flush, each backward with the weights of its forward.

Sources: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training" (one micro-batch per
update); Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-2BW: M >= P micro-batches
per update, two versions). What a step computes is not the gradient of one model, so the executor does not run it; the
synchronous form is 1f1b. The built order is the first M micro-batches of an endless stream.

P ranks, M micro-batches per update, uniform F and B, no transfer time:
    warm-up    P - 1 - r forwards on rank r
    makespan   (M + P - 1) (F + B) of the first M micro-batches
    step       M (F + B) in the steady state, without a bubble                         -> steady_micro_batches()
    in flight  P - r micro-batches on rank r in the steady state, min(M, P - r) of the first M
    weights    1 + ceil((P - 1 - r) / M) versions on rank r: P - r for M = 1, two for M >= P - 1 and r < P - 1
                                                                                       -> weight_versions()
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from planner.schedule.actions import Schedule
from planner.schedule.closed_forms import family_1f1b, warm_up_per_rank
from planner.schedule.durations import Durations
from planner.schedule.entry import ScheduleEntry, Shape
from planner.schedule.one_f_one_b import rank_actions


@dataclass(frozen=True, slots=True)
class Cycle:
    """Neighbouring ranks that wait for each other in the steady state."""

    first: int
    """Pipeline rank."""
    last: int
    seconds: float
    """Time of `micro_batches` micro-batches."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches that pass in one round."""
        return self.last - self.first + 1


def cycles(durations: Durations) -> Iterator[Cycle]:
    """Yield every run of neighbouring ranks r to q, and what one round of it takes.

    Rank r runs q - r forwards further ahead than rank q. Its forward of a micro-batch therefore waits for the backward
    of the one q - r + 1 before, which has passed forward and backward through all ranks of the run, and twice through
    every boundary between them. No other cycle is slower: the steady state has exactly the longest mean.
    """
    work = [
        sum(parts)
        for parts in zip(
            durations.forward,
            durations.backward_input,
            durations.backward_weight,
            durations.recompute,
            strict=True,
        )
    ]
    boundaries = map(
        sum, zip(durations.transfer_forward, durations.transfer_backward, strict=True)
    )
    worked = [0, *accumulate(work)]
    moved = [0, *accumulate(boundaries)]
    for first in range(durations.stages):
        for last in range(first, durations.stages):
            busy = worked[last + 1] - worked[first]
            transfers = moved[last] - moved[first]
            yield Cycle(first, last, busy + transfers)


def steady_micro_batches(durations: Durations, micro_batches: int) -> float:
    """Return the seconds of so many micro-batches in the steady state, without updates of the weights.

    With a pause of each rank after its last backward of every step, a step takes at most the longest pause more: on no
    chain of actions that wait for each other do two pauses of the same step lie.
    """
    return max(
        micro_batches * one.seconds / one.micro_batches for one in cycles(durations)
    )


def weight_versions(ranks: int, micro_batches: int, rank: int) -> int:
    """Return the versions of its weights that a rank stores, the latest one included.

    Args:
        ranks: pipeline ranks.
        micro_batches: of one update.
        rank: pipeline rank.
    """
    ahead = ranks - 1 - rank
    return 1 + -(-ahead // micro_batches)


def in_steady_state(schedule: Schedule) -> Schedule:
    """Return the order of as many micro-batches as fill the pipeline, at least those of the schedule."""
    if schedule.micro_batches >= schedule.ranks:
        return schedule
    return PIPEDREAM.build(Shape(schedule.ranks, schedule.ranks))


PIPEDREAM = ScheduleEntry(
    name="pipedream",
    summary="1f1b without a flush between steps, with stashed weights: not synchronous; for simulation only",
    rank_actions=rank_actions,
    forms=family_1f1b(warm_up_per_rank(1)),
    aliases=("pipedreamasync", "async1f1b"),
    is_asynchronous=True,
)
