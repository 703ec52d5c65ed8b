"""Layouts whose order of micro-batches is made for their own stages, and not taken from a list of schedules.

    (Y1)  the layers are dealt to stages by (E1) and (E2) of `planner.search.dealt`; several stages per rank stand in a
          loop or in a V, whichever gives the faster step                                           -> questions()
    (Y2)  the order of each: durations by (S1), tails by (S3), and on every rank room for the units that fit beside all
          that no order changes, (M1) to (M4); backwards are split where nothing recomputes         -> Question.of()
    (Y3)  no order is faster than (P1) to (P3) of `planner.schedule.order_bound` tell               -> least_ticks()
    (Y4)  the best order that needs no search; where that leaves a gap, CP-SAT looks for one below the incumbent, as
          long as the order has at most `SOLVED_ACTIONS`, and the layout's and the search's work last -> synthesized()

Work is CP-SAT's own measure of it, not seconds, so that the answer is always the same. What it leaves unproven stays
open: the bound of such a layout counts in the search's gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from planner.cost import (
    LayoutCosts,
    StageLayers,
    StageMap,
    choose,
    durations,
    evaluate,
    stage_memory,
    tail_ticks,
)
from planner.cost.memory import unit_bytes
from planner.cost.step import by_rank
from planner.errors import LayoutError
from planner.schedule import Placement, Schedule
from planner.schedule.greedy import backward_first
from planner.schedule.order_model import Effort
from planner.schedule.order_problem import OrderProblem
from planner.schedule.room import Room
from planner.schedule.synthesize import Synthesis, best_known, best_order, best_shape
from planner.search.dealt import Traits, Uniform, deal
from planner.search.result import Candidate

SOLVED_ACTIONS = 512
"""Of an order that CP-SAT is asked for; beyond, it improves none within its work. 8 ranks x 16 micro-batches: 384."""
LAYOUT_WORK = 1.0
"""Of CP-SAT for one layout, in its deterministic time."""
SEARCH_WORK = 8.0
"""For all of them."""


@dataclass(frozen=True, slots=True)
class Unordered:
    """A layout whose order is to be synthesized."""

    costs: LayoutCosts
    layers: Uniform
    is_tight: bool = False
    """Bounded by (Y3)."""


@dataclass(frozen=True, slots=True)
class Question:
    """One way to put a layout's stages on its ranks, and the question for the order."""

    costs: LayoutCosts
    stage_map: StageMap
    problem: OrderProblem

    @classmethod
    def of(cls, costs: LayoutCosts, stage_map: StageMap, shape: Schedule) -> Self:
        """Equation (Y2).

        Args:
            costs: of the layout.
            stage_map: layers of every stage.
            shape: stages on their ranks.
        """
        stages = choose(costs, stage_map)
        problem = OrderProblem(
            shape=shape,
            durations=durations(costs, stages),
            room=room_of(costs, stages, shape),
            tails=tuple(sum(parts) for parts in tail_ticks(costs, by_rank(shape, stages))),
            is_split=all(mode == "none" for stage in stage_map for _, mode in stage),
        )
        return cls(costs, stage_map, problem)

    @property
    def is_possible(self) -> bool:
        """Some order fits."""
        return self.problem.room.is_enough(self.problem.shape)

    def candidate(self, schedule: Schedule) -> Candidate:
        """The plan of an order."""
        return Candidate(
            self.costs, schedule, self.stage_map, evaluate(self.costs, schedule, choose(self.costs, self.stage_map))
        )


@dataclass(frozen=True, slots=True)
class Synthesized:
    """What became of a layout."""

    candidate: Candidate | None
    """Its best plan that was found; None: no order fits."""
    bound_ticks: int
    """No order is faster, or faster than what it was to beat."""
    work: float
    """Of CP-SAT."""


def room_of(costs: LayoutCosts, stages: Sequence[StageLayers], shape: Schedule) -> Room:
    """Bytes of a unit of every stage, and what every rank's device has left for units in flight: (M1) to (M4)."""
    units = [unit_bytes(costs, stages, index) for index in range(shape.stages)]
    alone = replace(shape, micro_batches=1, actions=backward_first(shape.stage_ranks, 1, limit=1))
    once = stage_memory(costs, stages, alone)
    held = [sum(units[stage] for stage in shape.stages_of(row.pipeline_rank)) for row in once]
    left = [row.capacity_bytes - row.peak_bytes + own for row, own in zip(once, held, strict=True)]
    return Room(tuple(units), tuple(left))


def shapes_of(costs: LayoutCosts) -> tuple[Schedule, ...]:
    """The layout's stages on its ranks in every way of (Y1).

    Raises:
        LayoutError: activations go to the host, where orders would have to keep to its memory too.
    """
    layout = costs.layout
    if layout.activation_offload:
        raise LayoutError(
            "no order is synthesized for activations that go to the host.",
            field="layout.schedule",
            mend="give a schedule of full backwards, such as 1f1b, or leave activations on the device.",
        )
    numbers = (layout.pipeline_parallel_degree, costs.micro_batches, layout.virtual_stages_per_rank)
    found = [best_shape(*numbers, layout.sequence_chunks, placement) for placement in Placement]
    return tuple(found[:1] if numbers[2] == 1 else found)


def first_bound(layout: Unordered) -> int | None:
    """Ticks that no order takes less than, told by the layers alone; None: none fits."""
    costs, layers = layout.costs, layout.layers
    bounds = []
    for shape in shapes_of(costs):
        sizes = deal(layers.work, shape.stage_ranks)
        # When a rank's first backward runs, it holds a whole micro-batch of all its stages.
        held = (dict.fromkeys(shape.stages_of(rank), 1) for rank in (0, shape.ranks - 1))
        if layers.may_hold(sizes, Traits(tuple(held), ends_low=False)):
            bounds.append(layers.bound(sizes, shape.stage_ranks, ends_low=False))
    return min(bounds, default=None)


def least_ticks(layout: Unordered) -> int | None:
    """Ticks that no order takes less than: equation (Y3); None: none fits."""
    fitting = (question for question in questions(layout) if question.is_possible)
    return min((math.ceil(question.problem.bound()) for question in fitting), default=None)


def questions(layout: Unordered, counts: Sequence[int] | None = None) -> tuple[Question, ...]:
    """The layout's stages in every way of (Y1).

    Args:
        layout: whose order is to be found.
        counts: layers of every stage, where they are given and not dealt.
    """
    costs, layers = layout.costs, layout.layers
    return tuple(
        Question.of(costs, layers.stage_map(counts or deal(layers.work, shape.stage_ranks)), shape)
        for shape in shapes_of(costs)
    )


def synthesized(
    layout: Unordered,
    *,
    limit_ticks: int,
    work: float = SEARCH_WORK,
    seconds: float = float("inf"),
    counts: Sequence[int] | None = None,
) -> Synthesized:
    """The best plan of a layout: equations (Y1) to (Y4).

    Args:
        layout: whose order is to be found.
        limit_ticks: only orders faster than this are searched; what is known without a search is told all the same.
        work: that is left for CP-SAT, over all layouts.
        seconds: that are left.
        counts: layers of every stage, where they are given and not dealt.
    """
    spent, bounds, found = 0.0, [], []
    for question in questions(layout, counts):
        known = best_known(question.problem)
        if known is None:
            continue
        best = min([limit_ticks, *(one.ticks for one in found)])
        made = _searched(question.problem, known, best, min(work - spent, LAYOUT_WORK), seconds)
        spent += made.deterministic
        bounds.append(math.ceil(made.lower_bound))
        found.append(question.candidate(made.schedule))
    fastest = min(found, key=lambda one: one.ticks, default=None)
    return Synthesized(fastest, min(bounds, default=limit_ticks), spent)


def _searched(problem: OrderProblem, known: Synthesis, limit_ticks: int, work: float, seconds: float) -> Synthesis:
    if problem.actions > SOLVED_ACTIONS or min(work, seconds) <= 0:
        return known
    return best_order(problem, known, Effort(seconds, work), below=min(limit_ticks, known.value))
