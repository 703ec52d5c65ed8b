"""How far predictions are from measured runs: errors, decisions, ranks and coverage.

A relative error is (predicted - measured) / measured. A prediction that failed counts
as zero seconds and bytes (error -1), outside every interval, and a wrong decision.

decision      does the run fit in memory, or run out of it?
rank group    runs of one model, devices and batch that differ in their layout.
              Spearman's rank correlation is that of predicted and measured seconds;
              regret is measured seconds of the plan predicted fastest (the slowest of
              those that tie) / measured seconds of the fastest. Runs of one plan are
              one plan with their medians.
coverage      share of the measured step times within the interval of 80 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Protocol

import numpy as np

from planner.spec.run import Run

LEAST_RUNS = 3
"""Timed runs of a rank group whose order is judged."""
FAILED = -1.0
"""Relative error of a prediction that failed."""
P90 = 90


class Scored(Protocol):
    """A measured run, and which of its values are scored."""

    @property
    def run(self) -> Run:
        """Documents and result."""

    @property
    def family(self) -> str:
        """Data set of the run."""

    @property
    def source(self) -> str:
        """Who measured."""

    @property
    def kind(self) -> str:
        """Model, architecture of the device and runtime."""

    @property
    def group(self) -> str:
        """Rank group; empty: none."""

    @property
    def use_time(self) -> bool:
        """Whether the step time is scored."""

    @property
    def use_memory(self) -> bool:
        """Whether the memory is scored."""

    @property
    def use_fit(self) -> bool:
        """Whether the decision to fit is scored."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """The predicted counterparts of a run's measured values."""

    seconds: float
    """Of what was timed: a step, or the blocks alone."""
    memory_bytes: float
    """Of the kind, and on the rank, that was measured."""
    fits: bool
    seconds_80: tuple[float, float] | None = None
    """Interval that contains the measured time with a probability of 80 %."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measured run and its prediction."""

    measured: Scored
    predicted: Predicted | None
    """None: the prediction failed."""
    failure: str = ""
    """Error message of a prediction that failed."""
    is_defect: bool = False
    """The prediction failed by a defect, not by a documented limit."""

    @property
    def measured_seconds(self) -> float | None:
        """Measured time; None: not scored."""
        result = self.measured.run.result
        return result.step_seconds if self.measured.use_time else None

    @property
    def predicted_seconds(self) -> float:
        """Predicted time; 0 if the prediction failed."""
        return self.predicted.seconds if self.predicted else 0.0

    @property
    def time_error(self) -> float | None:
        """Relative error of the time; None: not scored."""
        return self._error(self.measured_seconds, self.predicted_seconds)

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory; None: not scored."""
        measured = self.measured.run.result.memory_bytes
        if not self.measured.use_memory:
            return None
        return self._error(
            measured, self.predicted.memory_bytes if self.predicted else 0
        )

    def _error(self, measured: float | None, predicted: float) -> float | None:
        if measured is None:
            return None
        return predicted / measured - 1 if self.predicted else FAILED

    @property
    def is_covered(self) -> bool | None:
        """Whether the interval contains the time; None: no time, or no interval."""
        measured = self.measured_seconds
        if measured is None:
            return None
        if self.predicted is None:
            return False
        interval = self.predicted.seconds_80
        if interval is None:
            return None
        low, high = interval
        return low <= measured <= high

    @property
    def ran_out(self) -> bool:
        """Whether the run ran out of memory."""
        return self.measured.run.result.outcome == "oom"

    @property
    def predicted_fit(self) -> bool:
        """Whether it was predicted to fit; a failed prediction is a wrong one."""
        return self.predicted.fits if self.predicted else self.ran_out

    @property
    def plan(self) -> str:
        """Everything but the measured values, as text."""
        return self.measured.run.model_dump_json(exclude={"result", "source"})


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of several runs."""

    runs: int
    median: float
    """Median of the absolute errors."""
    mean: float
    """Mean of the absolute errors (MAPE)."""
    p90: float
    bias: float
    """Mean of the signed errors: above zero, predictions are too high."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Predictions that a run fits or runs out of memory."""

    runs: int
    predicted_fits: int
    false_fits: int
    """Predicted to fit, but ran out of memory."""
    false_refusals: int
    """Predicted not to fit, but ran."""

    @property
    def accuracy(self) -> float:
        """Share of correct decisions."""
        return 1 - (self.false_fits + self.false_refusals) / self.runs

    @property
    def false_fit_rate(self) -> float:
        """Share of the runs predicted to fit that ran out; 0 if there are none."""
        return self.false_fits / self.predicted_fits if self.predicted_fits else 0.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The order of the plans of one group."""

    family: str
    name: str
    runs: int
    plans: int
    spearman: float
    regret: float


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of several runs; None: nothing to judge."""

    runs: int
    failures: int
    time: Errors | None
    memory: Errors | None
    decisions: Decisions | None
    coverage_80: float | None
    groups: tuple[RankGroup, ...]

    @property
    def mean_regret(self) -> float | None:
        """Mean over the rank groups."""
        return mean(group.regret for group in self.groups) if self.groups else None

    @property
    def spearman(self) -> float | None:
        """Mean over the rank groups."""
        return mean(group.spearman for group in self.groups) if self.groups else None


def figures(outcomes: Iterable[Outcome]) -> Figures:
    """Return the figures of these runs together."""
    chosen = list(outcomes)
    covered = [one.is_covered for one in chosen if one.is_covered is not None]
    return Figures(
        runs=len(chosen),
        failures=sum(one.predicted is None for one in chosen),
        time=errors_of(one.time_error for one in chosen),
        memory=errors_of(one.memory_error for one in chosen),
        decisions=decisions_of(chosen),
        coverage_80=mean(covered) if covered else None,
        groups=rank_groups(chosen),
    )


def figures_by(outcomes: Iterable[Outcome], field: str) -> dict[str, Figures]:
    """Return the figures by a field of the runs.

    Args:
        outcomes: runs and predictions.
        field: ``family``, ``source`` or ``kind``.
    """
    parts: dict[str, list[Outcome]] = defaultdict(list)
    for one in outcomes:
        parts[getattr(one.measured, field)].append(one)
    return {name: figures(parts[name]) for name in sorted(parts)}


def errors_of(errors: Iterable[float | None]) -> Errors | None:
    """Return a summary of relative errors, None left out; None without any."""
    signed = np.array([error for error in errors if error is not None], dtype=float)
    if not signed.size:
        return None
    sizes = np.abs(signed)
    return Errors(
        runs=len(signed),
        median=float(np.median(sizes)),
        mean=float(sizes.mean()),
        p90=float(np.percentile(sizes, P90)),
        bias=float(signed.mean()),
    )


def decisions_of(outcomes: Iterable[Outcome]) -> Decisions | None:
    """Return the decisions that are scored; None without any."""
    scored = [one for one in outcomes if one.measured.use_fit]
    if not scored:
        return None
    fits = [one for one in scored if one.predicted_fit]
    refused = [one for one in scored if not one.predicted_fit]
    return Decisions(
        runs=len(scored),
        predicted_fits=len(fits),
        false_fits=sum(one.ran_out for one in fits),
        false_refusals=sum(not one.ran_out for one in refused),
    )


def rank_groups(outcomes: Iterable[Outcome]) -> tuple[RankGroup, ...]:
    """Return every group with `LEAST_RUNS` timed runs and two plans."""
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        if one.measured.group and one.measured_seconds is not None:
            groups[one.measured.family, one.measured.group].append(one)
    found = []
    for (family, name), runs in groups.items():
        if len(runs) < LEAST_RUNS:
            continue
        predicted, measured = _plan_seconds(runs)
        plans = len(measured)
        if plans < 2:
            continue
        correlation = spearman(predicted, measured)
        lost = regret(predicted, measured)
        found.append(RankGroup(family, name, len(runs), plans, correlation, lost))
    return tuple(found)


def _plan_seconds(runs: Iterable[Outcome]) -> tuple[list[float], list[float]]:
    """Predicted and measured seconds of every plan, the medians of its runs."""
    plans: dict[str, list[Outcome]] = defaultdict(list)
    for one in runs:
        plans[one.plan].append(one)
    predicted = []
    measured = []
    for same in plans.values():
        predicted.append(median(one.predicted_seconds for one in same))
        measured.append(median(one.measured_seconds or 0.0 for one in same))
    return predicted, measured


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return measured seconds of the plan predicted fastest / those of the fastest."""
    fastest = min(predicted)
    pairs = zip(predicted, measured, strict=True)
    chosen = max(seconds for guess, seconds in pairs if guess == fastest)
    return chosen / min(measured)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the rank correlation; 0 if all values of one side are equal."""
    ranks = np.array([_ranks(left), _ranks(right)])
    if not ranks.std(axis=1).all():
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from zero; equal values have the mean of their ranks."""
    array = np.asarray(values, dtype=float)
    ranks = []
    for value in array:
        below = (array < value).sum()
        equal = (array == value).sum()
        ranks.append(float(below + (equal - 1) / 2))
    return ranks


def as_json(found: Figures) -> dict[str, Any]:
    """Return the figures as JSON; null: nothing to judge."""
    time = found.time
    memory = found.memory
    decisions = found.decisions
    return {
        "runs": found.runs,
        "failures": found.failures,
        "time_runs": time.runs if time else 0,
        "time_median_ape": time and time.median,
        "time_mape": time and time.mean,
        "time_p90": time and time.p90,
        "time_bias": time and time.bias,
        "coverage_80": found.coverage_80,
        "memory_runs": memory.runs if memory else 0,
        "memory_median_ape": memory and memory.median,
        "memory_mape": memory and memory.mean,
        "memory_p90": memory and memory.p90,
        "memory_bias": memory and memory.bias,
        "oom_runs": decisions.runs if decisions else 0,
        "oom_accuracy": decisions and decisions.accuracy,
        "false_fit_rate": decisions and decisions.false_fit_rate,
        "rank_groups": len(found.groups),
        "mean_regret": found.mean_regret,
        "spearman": found.spearman,
    }


def median_of_medians(parts: Mapping[str, Figures]) -> float | None:
    """Return the median over the parts of the median errors of the time."""
    medians = [part.time.median for part in parts.values() if part.time]
    return median(medians) if medians else None


def mean_coverage(parts: Mapping[str, Figures]) -> float | None:
    """Return the mean coverage of the parts, each with the same weight."""
    shares = [part.coverage_80 for part in parts.values()]
    known = [share for share in shares if share is not None]
    return mean(known) if known else None
