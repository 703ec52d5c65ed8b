"""Layouts whose order of micro-batches is made for their own stages, and not taken from a list of schedules.

    (Y1)  the layers are dealt to stages by (E1) and (E2) of `stage_maps.dealt`; several stages per rank stand in a
          loop or in a V, whichever gives the faster step                                           -> questions()
    (Y2)  the order of each: durations by (S1), tails by (S3), and on every rank room for the units that fit beside all
          that no order changes, (M1) to (M4); backwards are split where nothing recomputes         -> Question.of()
    (Y3)  no order is faster than (P1) to (P3) of `planner.schedule.order_bound` tell               -> least_ticks()
    (Y4)  the best order that needs no search; where that leaves a gap, and the order has at most `SOLVED_ACTIONS`, what
          CP-SAT finds with `LAYOUT_WORK`. Where that order is not below the incumbent, CP-SAT looks for one that is, as
          long as `SEARCH_WORK` lasts for all layouts together                                      -> synthesized()

Work is CP-SAT's own measure of it, not seconds, so that the answer is always the same. What it leaves unproven stays
open: the bound of such a layout counts in the search's gap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
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
from planner.errors import UnsupportedError
from planner.schedule import Placement, Schedule
from planner.schedule.greedy import backward_first
from planner.schedule.order_bound import SPLIT
from planner.schedule.order_model import Effort
from planner.schedule.order_problem import OrderProblem
from planner.schedule.room import Room
from planner.schedule.synthesize import (
    MOST_ACTIONS,
    Synthesis,
    best_known,
    best_order,
    best_shape,
)
from planner.schedule.synthesized import NAME
from planner.search.result import Candidate
from planner.search.stage_maps.dealt import Traits, Uniform
from planner.search.stage_maps.inside import NO_LIMIT

SOLVED_ACTIONS = 512
"""Of an order that CP-SAT is asked for; beyond, it improves none within its work. 8 ranks x 16 micro-batches: 384."""
LAYOUT_WORK = 0.25
"""Of CP-SAT for one layout and placement, in its deterministic time."""
SEARCH_WORK = 2.0
"""For all whose known order is not below the incumbent."""


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
            tails=tuple(
                sum(parts) for parts in tail_ticks(costs, by_rank(shape, stages))
            ),
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
            self.costs,
            schedule,
            self.stage_map,
            evaluate(self.costs, schedule, choose(self.costs, self.stage_map)),
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
    """Bytes of a unit of every stage, and what every rank's device has left for units in flight: (M1) to (M4). Nothing
    where states overflow the host, whatever the order."""
    units = [unit_bytes(costs, stages, index) for index in range(shape.stages)]
    alone = replace(
        shape,
        micro_batches=1,
        sequence_chunks=1,
        actions=backward_first(shape.stage_ranks, 1, limit=1),
    )
    once = stage_memory(costs, stages, alone)
    held = [
        sum(units[stage] for stage in shape.stages_of(row.pipeline_rank))
        for row in once
    ]
    spare = [
        row.capacity_bytes - row.peak_bytes + own
        for row, own in zip(once, held, strict=True)
    ]
    left = [own if row.fits_host else -1 for row, own in zip(once, spare, strict=True)]
    return Room(tuple(units), tuple(left))


def check_synthesis(costs: LayoutCosts) -> None:
    """Refuse a layout whose order cannot be synthesized.

    Raises:
        UnsupportedError: what of it is not known to the search for orders.
    """
    layout, orders = costs.layout, f"no order is {NAME} "
    actions = (
        len(SPLIT)
        * layout.pipeline_parallel_degree
        * layout.virtual_stages_per_rank
        * costs.micro_batches
    )
    for is_wrong, field, why, hint in (
        (
            bool(costs.columns or costs.ranks),
            "schedule",
            "for ranks that differ",
            "give gpipe or 1f1b",
        ),
        (
            layout.activation_offload,
            "activation_offload",
            "with activation offload",
            "give false",
        ),
        (
            layout.recompute == "per-layer",
            "recompute",
            "per layer",
            "give none, selective or full",
        ),
        (
            actions > MOST_ACTIONS,
            "schedule",
            f"of {actions} actions, more than {MOST_ACTIONS}",
            "give another one",
        ),
    ):
        if is_wrong:
            raise UnsupportedError(
                f"{orders}{why}.", field=f"layout.{field}", hint=f"{hint}."
            )


def shapes_of(costs: LayoutCosts) -> tuple[Schedule, ...]:
    """The layout's stages on its ranks in every way of (Y1)."""
    layout = costs.layout
    numbers = (
        layout.pipeline_parallel_degree,
        costs.micro_batches,
        layout.virtual_stages_per_rank,
    )
    found = [
        best_shape(*numbers, layout.sequence_chunks, placement)
        for placement in Placement
    ]
    return tuple(found[:1] if numbers[2] == 1 else found)


def first_bound(layout: Unordered) -> int | None:
    """Ticks that no order takes less than, told by the layers alone; None: none fits."""
    costs, layers = layout.costs, layout.layers
    bounds = []
    for shape in shapes_of(costs):
        sizes = layers.dealt(shape.stage_ranks)
        # When a rank's first backward runs, it holds a whole micro-batch of all its stages.
        held = (
            dict.fromkeys(shape.stages_of(rank), 1) for rank in (0, shape.ranks - 1)
        )
        if layers.may_hold(sizes, Traits(tuple(held), ends_low=False)):
            bounds.append(layers.bound(sizes, shape.stage_ranks, ends_low=False))
    return min(bounds, default=None)


def least_ticks(layout: Unordered) -> int | None:
    """Ticks that no order takes less than: equation (Y3); None: none fits."""
    fitting = (question for question in questions(layout) if question.is_possible)
    return min(
        (math.ceil(question.problem.bound()) for question in fitting), default=None
    )


def questions(layout: Unordered) -> tuple[Question, ...]:
    """The layout's stages in every way of (Y1)."""
    costs, layers = layout.costs, layout.layers
    return tuple(
        Question.of(costs, layers.stage_map(layers.dealt(shape.stage_ranks)), shape)
        for shape in shapes_of(costs)
    )


def synthesized(
    layout: Unordered,
    *,
    limit_ticks: int,
    work: float = 0.0,
    each: float = LAYOUT_WORK,
    seconds: float = inf,
) -> Synthesized:
    """The best plan of a layout: equations (Y1) to (Y4).

    Args:
        layout: whose order is to be found.
        limit_ticks: only orders faster than this matter.
        work: that is left for CP-SAT to look for one where none is known, over all layouts.
        each: work of CP-SAT for one placement of the stages.
        seconds: that are left.
    """
    return _best(questions(layout), limit_ticks, work, each, seconds)


def given_order(layout: Unordered) -> Candidate:
    """The plan of one given layout, as a search would have it, whether it fits or not."""
    asked = questions(layout)
    fitting = _best(asked, NO_LIMIT).candidate
    if fitting is not None:
        return fitting
    free = (Room.of_units(each.problem.shape, None) for each in asked)
    anyway = [
        replace(each, problem=replace(each.problem, room=room))
        for each, room in zip(asked, free, strict=True)
    ]
    found = _best(anyway, NO_LIMIT).candidate
    assert found is not None, "without a limit on memory every order fits"
    return found


def _best(
    asked: Sequence[Question],
    limit_ticks: int,
    work: float = 0.0,
    each: float = LAYOUT_WORK,
    seconds: float = inf,
) -> Synthesized:
    ended, bounds, best = time.monotonic() + seconds, [], None
    left = work
    for question in asked:
        known = best_known(question.problem)
        if known is None:
            continue
        limit = min(limit_ticks, best.ticks) if best else limit_ticks
        made = _answer(
            question.problem, known, limit, each, Effort(ended - time.monotonic(), left)
        )
        left -= made.deterministic
        bounds.append(math.ceil(made.lower_bound))
        if best is None or made.value < best.ticks:
            best = question.candidate(made.schedule)
    return Synthesized(best, min(bounds, default=limit_ticks), work - left)


def _answer(
    problem: OrderProblem, known: Synthesis, limit: int, each: float, left: Effort
) -> Synthesis:
    """The best order below a limit, or what excludes one: equation (Y4).

    Whatever the limit was, an order below it is the one that CP-SAT finds without: so `given_order` finds it again.
    """
    if problem.actions > SOLVED_ACTIONS or left.seconds <= 0:
        return known
    spent, seen = 0.0, known
    if known.value >= limit:
        work = min(left.deterministic, each)
        seen = (
            best_order(problem, known, Effort(left.seconds, work), below=limit)
            if work > 0
            else known
        )
        spent = seen.deterministic
    if seen.value >= limit:
        return seen
    free = best_order(problem, known, Effort(left.seconds, each))
    best = min(free, seen, key=lambda one: one.value)
    bound = min(max(free.lower_bound, seen.lower_bound), best.value)
    return replace(best, lower_bound=bound, deterministic=spent)
