"""How far runs of one plan lie apart, and in how many rank groups the fastest plan could be named at all.

(N1)  spread of a family        sigma^2 = sum over plans of sum (log t - mean log t)^2 / sum over plans of (runs - 1),
                                of the plans that ran twice or more                              -> spread_of_runs()
(N2)  groups that could be won  if the model were right of every plan's mean: t = predicted exp(w sigma z), z standard
                                normal for each source of noise. A group is won where the plan that is predicted
                                fastest is within `CLOSE` of the fastest drawn                   -> winnable()
(N3)  simulated steps           are sums of traces, one for each width, tensor degree and micro-batch size, so all
                                plans of one trace share its z. w = d log(step) / d log(host time), by the cost
                                model; sigma from traces that launch equally many kernels and wait for the host
                                most of the time (w > 1/2): the spread of log(step / predicted) / w among them
                                                                                                 -> spread_of_traces()
(N4)  how such steps give themselves away: runs that differ in the number of micro-batches alone lie on a straight
      line to the last digit, which no clock does                                                -> lines()
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median, quantiles

import numpy as np

from planner.fidelity.calibrations import constants_for
from planner.fidelity.metrics import LEAST_RUNS, Outcome
from planner.fidelity.outcomes import pair_of
from planner.fidelity.predict import costs_of, predict_run
from planner.fidelity.rows import Run

CLOSE = 1.03
"""Measured seconds of the chosen plan / the fastest's, in a group that counts as won."""
DRAWS = 1000
"""Of every group's noise."""
NUDGE = 1.05
"""Host time / the fitted one's, for the slope of (N3)."""
LEAST_ON_LINE = 3
Trace = tuple[int, int, int, int, int]
"""Hidden size, feed-forward size, heads, tensor-parallel degree, micro-batch size."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative distance of runs from their plan's mean."""

    sigma: float
    """Of the logarithm of seconds."""
    plans: int
    """That ran twice or more; of simulated steps, the traces."""


@dataclass(frozen=True, slots=True)
class Winnable:
    """Rank groups, and in how many of them the fastest plan is named."""

    groups: int
    won: int
    """Within `CLOSE` of the fastest, as measured."""
    expected: float | None = None
    """By a model that is right of every mean; None: no plan ran twice."""
    least: int | None = None
    """At the 5th percentile of the draws."""
    most: int | None = None
    """At the 95th."""


@dataclass(frozen=True, slots=True)
class Line:
    """Steps of runs that differ in the number of micro-batches alone."""

    family: str
    runs: int
    distance: float
    """Of the farthest, relative to its own seconds, from the straight line that fits best."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """One plan of a rank group; seconds are medians of its runs."""

    run: Run
    predicted: float
    measured: float


def timed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Those whose step was told and predicted, without rows whose time is overhead."""
    return [
        one
        for one in outcomes
        if one.time_error is not None and one.predicted is not None
    ]


def spread_of_runs(outcomes: Iterable[Outcome]) -> Spread | None:
    """Equation (N1); None where no plan ran twice."""
    plans: dict[Hashable, list[float]] = defaultdict(list)
    for one in timed(outcomes):
        plans[_plan(one.run), one.remarks.words].append(math.log(_seconds(one)))
    repeated = [np.array(each) for each in plans.values() if len(each) > 1]
    if not repeated:
        return None
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in repeated)
    return Spread(
        math.sqrt(squares / sum(len(each) - 1 for each in repeated)), len(repeated)
    )


def spread_of_traces(
    outcomes: Iterable[Outcome], shares: Mapping[Run, float]
) -> Spread | None:
    """Equation (N3); None where fewer than two traces launch equally many kernels."""
    traces: dict[tuple[int, Trace], list[float]] = defaultdict(list)
    for one in timed(outcomes):
        if shares[one.run] > 0.5:
            error = math.log(_seconds(one) / one.predicted_seconds) / shares[one.run]
            traces[_launches(one.run), trace_of(one.run)].append(error)
    alike: dict[int, list[float]] = defaultdict(list)
    for (launches, _), errors in traces.items():
        alike[launches].append(mean(errors))
    several = [np.array(each) for each in alike.values() if len(each) > 1]
    if not several:
        return None
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in several)
    return Spread(
        math.sqrt(squares / sum(len(each) - 1 for each in several)),
        sum(map(len, several)),
    )


def host_share(run: Run) -> float:
    """w of equation (N3): the part of a step that the host's launches set, by the constants of the package."""
    fitted = constants_for(*pair_of(run))
    slower = replace(
        fitted,
        host_forward_seconds=fitted.host_forward_seconds * NUDGE,
        host_backward_seconds=fitted.host_backward_seconds * NUDGE,
    )
    steps = [predict_run(run, constants).step_seconds for constants in (fitted, slower)]
    return math.log(steps[1] / steps[0]) / math.log(NUDGE)


def trace_of(run: Run) -> Trace:
    """What a layer's trace depends on."""
    shape, layout = run.shape, run.layout
    return (
        shape.hidden,
        shape.feed_forward,
        shape.heads,
        layout.tensor_parallel_degree,
        layout.micro_batch_size,
    )


def winnable(
    outcomes: Iterable[Outcome],
    spread: Spread | None,
    *,
    source: Callable[[Run], Hashable] = lambda run: run,
    weight: Callable[[Run], float] = lambda run: 1.0,
) -> Winnable:
    """Equation (N2).

    Args:
        outcomes: of one family.
        spread: of its runs; None: not known.
        source: runs of the same source share their noise.
        weight: w, the part of its logarithm that a run takes of it.
    """
    groups = _groups(outcomes)
    won = sum(_is_won(each, [plan.measured for plan in each]) for each in groups)
    if spread is None or not groups:
        return Winnable(len(groups), won)
    weighed = [
        [(source(plan.run), spread.sigma * weight(plan.run)) for plan in each]
        for each in groups
    ]
    draw = random.Random(0)
    counts = [_drawn(groups, weighed, draw) for _ in range(DRAWS)]
    cuts = quantiles(counts, n=20)
    return Winnable(len(groups), won, mean(counts), round(cuts[0]), round(cuts[-1]))


def _drawn(
    groups: Sequence[Sequence[_Plan]],
    weighed: Sequence[Sequence[tuple[Hashable, float]]],
    draw: random.Random,
) -> int:
    """Groups won in one draw of all noise."""
    noise: dict[Hashable, float] = {}
    count = 0
    for group, sources in zip(groups, weighed, strict=True):
        for source, _ in sources:
            if source not in noise:
                noise[source] = draw.gauss(0.0, 1.0)
        pairs = zip(group, sources, strict=True)
        count += _is_won(
            group,
            [plan.predicted * math.exp(w * noise[name]) for plan, (name, w) in pairs],
        )
    return count


def _groups(outcomes: Iterable[Outcome]) -> list[list[_Plan]]:
    """The plans of every rank group that has several, and runs enough to be judged."""
    found: dict[str, dict[Hashable, list[Outcome]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for one in timed(outcomes):
        if one.run.rank_group:
            found[one.run.rank_group][_plan(one.run), one.remarks.words].append(one)
    return [
        [
            _Plan(each[0].run, each[0].predicted_seconds, median(map(_seconds, each)))
            for each in plans.values()
        ]
        for plans in found.values()
        if len(plans) > 1 and sum(map(len, plans.values())) >= LEAST_RUNS
    ]


def _is_won(group: Sequence[_Plan], steps: Sequence[float]) -> bool:
    """Of plans that are predicted alike the slowest counts, as in the order of plans."""
    first = min(plan.predicted for plan in group)
    chosen = max(
        step for plan, step in zip(group, steps, strict=True) if plan.predicted == first
    )
    return chosen <= CLOSE * min(steps)


def lines(outcomes: Iterable[Outcome]) -> list[Line]:
    """Equation (N4), of every three runs or more that differ in their micro-batches' number alone."""
    alike: dict[Run, dict[int, float]] = defaultdict(dict)
    for one in timed(outcomes):
        plan = replace(_plan(one.run), global_batch_size=0, rank_group="")
        alike[plan][one.run.global_batch_size] = _seconds(one)
    return [
        Line(plan.family, len(steps), _off_line(steps))
        for plan, steps in alike.items()
        if len(steps) >= LEAST_ON_LINE
    ]


def _off_line(steps: Mapping[int, float]) -> float:
    counts, measured = np.array(list(steps)), np.array(list(steps.values()))
    straight = np.polyval(np.polyfit(counts, measured, 1), counts)
    return float(np.abs(straight / measured - 1).max())


def _plan(run: Run) -> Run:
    """The run without what was measured of it."""
    return replace(
        run, source_id="", step_seconds=None, memory_bytes=None, memory_kind="allocated"
    )


def _seconds(one: Outcome) -> float:
    return one.run.step_seconds or math.nan


def _launches(run: Run) -> int:
    """Kernels of one block's forward."""
    block = costs_of(run).work.profile.layers[1].measurements[0]
    return sum(operation.count for operation in block.operations)
