"""Fit the cost model to measured runs, and measure how far it is off elsewhere.

Constants are pooled (`planner.calibrate.pooling`). The intervals of a calibration are
quantiles of log(measured / predicted) of runs that were held out: with their source
(what is known of runtime and architecture then depends on the other sources), and with
their whole architecture. Every source weighs the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from planner.calibrate.intervals import KINDS, Residual, distributions
from planner.calibrate.linearise import (
    FIXED,
    MEMORY,
    TIME,
    Measured,
    measured_run,
    moved,
    sizes,
    times,
)
from planner.calibrate.pooling import Linear, Pooled, Priors, solve, unfitted
from planner.cost.predict import RunPrediction, predict_run
from planner.spec.calibration import (
    MINIMUM_ROWS,
    CalibrationTable,
    IntervalRow,
    Kind,
    Residuals,
    RowCounts,
)
from planner.spec.run import Run

ITERATIONS = 3
Progress = Callable[[int, int], None]


class Scored(Protocol):
    """A published run, and which of its values count."""

    @property
    def run(self) -> Run:
        """Documents and result."""

    @property
    def source(self) -> str:
        """Who measured."""

    @property
    def use_time(self) -> bool:
        """Whether the step time counts."""

    @property
    def use_memory(self) -> bool:
        """Whether the memory counts."""

    @property
    def use_fit(self) -> bool:
        """Whether the outcome counts."""


@dataclass(frozen=True)
class Fit:
    """Fitted constants, and the linearised errors of all runs at them."""

    timed: Sequence[Measured]
    sized: Sequence[Measured]
    times: Linear
    sizes: Linear


def fit(runs: Iterable[Run], prior: CalibrationTable | None = None) -> CalibrationTable:
    """Return the calibration of measured runs.

    Args:
        runs: each with the name of its source.
        prior: a calibration whose constants the runs refine, and whose intervals are
            kept; None: the priors of this module, with intervals from held-out runs.
    """
    measured = [measured_run(run, source=run.source.name) for run in runs]
    known = [one for one in measured if one is not None]
    if prior is None:
        return _table(_fit(known), "own runs")
    found = _fit(known, _pooled_of(prior, TIME), _pooled_of(prior, MEMORY))
    name = f"{prior.name}, own runs"
    table = _document(found.times.at, found.sizes.at, known, prior.intervals, name)
    return table.model_copy(
        update={
            "measured_runs": prior.measured_runs + table.measured_runs,
            "offsets": _with_known(table.offsets, prior.offsets),
            "rows": _sum(prior.rows, table.rows),
            "memory": _sum(prior.memory, table.memory),
        }
    )


def _with_known(
    offsets: Mapping[str, Mapping[str, float]], known: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return all factors; an owner without new runs keeps its known one."""
    names = [*known, *offsets]
    return {name: {**known.get(name, {}), **offsets.get(name, {})} for name in names}


def _sum(left: RowCounts, right: RowCounts) -> RowCounts:
    return RowCounts(
        runtime=dict(Counter(left.runtime) + Counter(right.runtime)),
        architecture=dict(Counter(left.architecture) + Counter(right.architecture)),
        runtime_architecture=dict(
            Counter(left.runtime_architecture) + Counter(right.runtime_architecture)
        ),
    )


def fit_published(
    published: Iterable[Scored], name: str, progress: Progress | None = None
) -> CalibrationTable:
    """Return the calibration of published runs."""
    return _table(_fit(_measured(published), progress=progress), name)


def hold_out(
    published: Sequence[Scored], progress: Progress | None = None
) -> dict[str, Callable[[Run], RunPrediction]]:
    """Return predictors by source, each fitted to the runs of all other sources."""
    found = _fit(_measured(published), progress=progress)
    intervals = _intervals(found)
    predictors: dict[str, Callable[[Run], RunPrediction]] = {}
    for source in dict.fromkeys(one.source for one in published):
        time_rows = _without(found.timed, source)
        size_rows = _size_rows(found.sized, source)
        kept = [one for one in _all(found) if one.source != source]
        table = _document(
            solve(found.times, time_rows),
            solve(found.sizes, size_rows),
            kept,
            intervals,
            f"without {source}",
        )
        predictors[source] = _predictor(table)
    return predictors


def unfitted_table() -> CalibrationTable:
    """Return the priors as a calibration, without any run."""
    wide = Residuals(low=-0.4, high=0.4)
    row = IntervalRow(time=wide, memory=wide)
    return _document(
        unfitted(TIME), unfitted(MEMORY), [], dict.fromkeys(KINDS, row), "unfitted"
    )


def _predictor(table: CalibrationTable) -> Callable[[Run], RunPrediction]:
    return lambda run: predict_run(run, table)


def _measured(published: Iterable[Scored]) -> list[Measured]:
    found: list[Measured] = []
    for one in published:
        run = measured_run(
            one.run,
            source=one.source,
            use_time=one.use_time,
            use_memory=one.use_memory,
            use_fit=one.use_fit,
        )
        if run is not None:
            found.append(run)
    return found


def _fit(
    runs: Sequence[Measured],
    times_at: Pooled | None = None,
    sizes_at: Pooled | None = None,
    progress: Progress | None = None,
) -> Fit:
    timed = [run for run in runs if run.use_time]
    sized = [run for run in runs if run.use_memory or run.use_fit]

    def report(done: int) -> None:
        if progress is not None:
            progress(done, len(timed))

    of_time = times(timed, times_at or unfitted(TIME), report)
    of_time = replace(of_time, centre=times_at)
    of_size = replace(sizes(sized, sizes_at or unfitted(MEMORY)), centre=sizes_at)
    for _ in range(ITERATIONS):
        point = solve(of_time, range(len(of_time.owners)))
        of_time = moved(of_time, timed, point)
        point = solve(of_size, range(len(of_size.owners)))
        of_size = replace(sizes(sized, point), centre=sizes_at)
    return Fit(timed, sized, of_time, of_size)


def _without(runs: Sequence[Measured], source: str) -> list[int]:
    return [place for place, run in enumerate(runs) if run.source != source]


def _size_rows(runs: Sequence[Measured], source: str) -> list[int]:
    """Places of the rows of `sizes` that are of other sources."""
    found: list[int] = []
    place = 0
    for run in runs:
        rows = int(run.use_memory) + int(run.use_fit)
        if run.source != source:
            found += range(place, place + rows)
        place += rows
    return found


def _all(found: Fit) -> list[Measured]:
    by_identity = {id(run): run for run in (*found.timed, *found.sized)}
    return list(by_identity.values())


def _table(found: Fit, name: str) -> CalibrationTable:
    return _document(
        found.times.at, found.sizes.at, _all(found), _intervals(found), name
    )


def _document(
    time_point: Pooled,
    size_point: Pooled,
    runs: Sequence[Measured],
    intervals: Mapping[Kind, IntervalRow],
    name: str,
) -> CalibrationTable:
    priors: Priors = {**TIME, **MEMORY}
    bounds = {
        each: (prior.least, None if prior.most == float("inf") else prior.most)
        for each, prior in priors.items()
    }
    return CalibrationTable(
        name=name,
        measured_runs=len(runs),
        constants={**FIXED, **time_point.constants, **size_point.constants},
        offsets=_plain({**time_point.offsets, **size_point.offsets}),
        owners={each: prior.owner for each, prior in priors.items()},
        bounds=bounds,
        rows=_counts([run for run in runs if run.use_time]),
        memory=_counts([run for run in runs if run.use_memory]),
        intervals=dict(intervals),
    )


def _plain(offsets: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {name: dict(factors) for name, factors in offsets.items() if factors}


def _counts(runs: Sequence[Measured]) -> RowCounts:
    return RowCounts(
        runtime=dict(Counter(run.owners["runtime"] for run in runs)),
        architecture=dict(Counter(run.owners["architecture"] for run in runs)),
        runtime_architecture=dict(
            Counter(run.owners["runtime x architecture"] for run in runs)
        ),
    )


def _pooled_of(table: CalibrationTable, priors: Priors) -> Pooled:
    start = {name: prior.value for name, prior in priors.items()}
    known = {name: table.constants[name] for name in priors if name in table.constants}
    offsets = {name: table.offsets.get(name, {}) for name in priors}
    return Pooled({**start, **known}, offsets)


def _intervals(found: Fit) -> dict[Kind, IntervalRow]:
    """Return the distribution of held-out residuals by what is known."""
    time = _residuals(found.times, [run.owners["source"] for run in found.timed])
    size_sources = []
    is_memory = []  # of the peak itself: what an allocator caches is freed in need
    for run in found.sized:
        if run.use_memory:
            size_sources.append(run.source)
            is_memory.append(run.run.result.memory_kind == "allocated")
        if run.use_fit:
            size_sources.append(run.source)
            is_memory.append(False)
    memory = _residuals(found.sizes, size_sources, is_memory, halves=True)
    times_of = distributions(time)
    sizes_of = distributions(memory)
    return {
        kind: IntervalRow(time=times_of[kind], memory=sizes_of[kind]) for kind in KINDS
    }


def _residuals(
    linear: Linear,
    sources: Sequence[str],
    counted: Sequence[bool] | None = None,
    *,
    halves: bool = False,
) -> dict[Kind, list[Residual]]:
    """Return the residuals of held-out runs by what is known of them.

    Args:
        linear: all runs.
        sources: of every run.
        counted: whether a run counts; None: all do.
        halves: hold out the halves of sources too, for runtimes that only one source
            measured.
    """
    found: dict[Kind, list[Residual]] = defaultdict(list)
    everyone = range(len(sources))
    architectures = [owners["architecture"] for owners in linear.owners]
    partitions: list[Sequence[str]] = [sources, architectures]
    if halves:
        partitions.append([f"{sources[place]} {place % 2}" for place in everyone])
    for parts in partitions:
        for name in dict.fromkeys(parts):
            others = [place for place in everyone if parts[place] != name]
            errors = linear.errors_at(solve(linear, others))
            counts = _known(linear, others)
            for place in everyone:
                is_counted = counted is None or counted[place]
                if parts[place] != name or not is_counted:
                    continue
                kind = _kind_of(linear, place, counts)
                found[kind].append((sources[place], -float(errors[place])))
    return found


def _known(linear: Linear, places: Sequence[int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for place in places:
        owners = linear.owners[place]
        counts[owners["runtime x architecture"]] += 1
        counts[owners["architecture"]] += 1
    return counts


def _kind_of(linear: Linear, place: int, counts: Counter[str]) -> Kind:
    owners = linear.owners[place]
    if counts[owners["runtime x architecture"]] >= MINIMUM_ROWS:
        return "runtime"
    if counts[owners["architecture"]] >= MINIMUM_ROWS:
        return "architecture"
    return "neither"
