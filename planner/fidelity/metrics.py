"""How far predictions are from what was measured: errors, decisions to fit, and the order of plans.

A relative error is (predicted - measured) / measured. A run in scope whose prediction failed counts as one of zero
seconds and zero bytes, and as a wrong decision: a defect of the cost model must not make its figures better.

    decision      of the runs that ran or ran out on devices whose memory is known: does the cost model say so too?
    rank group    plans of one model, devices and batch: Spearman's rank correlation of predicted and measured seconds
                  (tied plans share the mean of their ranks), and regret = measured seconds of the plan that is
                  predicted fastest (the slowest of those tied) / the fastest measured. Rows that differ in measured
                  values, and in dates and other figures of their notes, are runs of one plan, which took their median
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from planner.fidelity.predict import Predicted
from planner.fidelity.remarks import PLAIN, Remarks, has_one_memory_size
from planner.fidelity.rows import Dataset, Run

LEAST_RUNS = 3
"""Of a rank group whose order is judged."""
FAILED = -1.0
"""Relative error of a prediction that failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run in scope, and what became of its prediction."""

    run: Run
    predicted: Predicted | None
    """None: the prediction failed."""
    failure: str = ""
    remarks: Remarks = PLAIN

    @property
    def time_error(self) -> float | None:
        """Of the step; None: not measured, or the row's own notes say that its time is overhead."""
        if self.run.step_seconds is None or self.remarks.time_is_overhead:
            return None
        return FAILED if self.predicted is None else self.predicted.time_error

    @property
    def memory_error(self) -> float | None:
        """Of the memory; None: not measured."""
        if self.run.memory_bytes is None:
            return None
        return FAILED if self.predicted is None else self.predicted.memory_error

    @property
    def activation_error(self) -> float | None:
        """Of what the first stage's blocks keep; None: not told apart."""
        told = self.remarks.activation_bytes
        if told is None:
            return None
        return (
            FAILED
            if self.predicted is None
            else self.predicted.block_activation_bytes / told - 1
        )

    @property
    def is_decided(self) -> bool:
        """Did it run or run out, on devices whose memory is known?"""
        measured = (
            self.run.step_seconds is not None or self.run.memory_bytes is not None
        )
        ended = self.run.ran_out or (
            measured and not self.remarks.is_modelled and not self.run.is_one_layer
        )
        return ended and (
            self.remarks.memory_is_stated or has_one_memory_size(self.run.device)
        )

    @property
    def said_to_fit(self) -> bool:
        """What the cost model says; a failed prediction says the opposite of what happened."""
        return self.run.ran_out if self.predicted is None else self.predicted.fits

    @property
    def predicted_seconds(self) -> float:
        """Zero when the prediction failed."""
        return 0.0 if self.predicted is None else self.predicted.step_seconds


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of several rows."""

    rows: int
    median: float
    """Of the absolute errors, like `mean` and `p90`."""
    mean: float
    """MAPE."""
    p90: float
    bias: float
    """Mean of the signed errors: above zero, predictions are too high."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """Fits or runs out: what was said, and what happened."""

    rows: int
    said_to_fit: int
    false_fits: int
    """Said to fit, but ran out."""
    false_refusals: int
    """Said not to fit, but ran."""

    @property
    def accuracy(self) -> float:
        """Share of right decisions."""
        return 1 - (self.false_fits + self.false_refusals) / self.rows

    @property
    def false_fit_rate(self) -> float:
        """Of the runs said to fit, those that ran out; zero when none is said to fit."""
        return self.false_fits / self.said_to_fit if self.said_to_fit else 0.0


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Plans of one model, devices and batch."""

    name: str
    runs: int
    plans: int
    spearman: float
    regret: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known of the predictions of some rows."""

    rows: int
    in_scope: int
    out_of_scope: dict[str, int]
    """Reason -> rows."""
    failures: int
    time_left_out: int
    """Rows whose measured time is overhead by their own notes."""
    time: Errors | None
    memory: Errors | None
    activations: Errors | None
    decisions: Decisions | None
    groups: tuple[RankGroup, ...]

    def mean_regret(self, least_runs: int = LEAST_RUNS) -> float | None:
        """Over the groups with so many runs."""
        return _mean(group.regret for group in self.groups if group.runs >= least_runs)

    @property
    def spearman(self) -> float | None:
        """Mean over the groups."""
        return _mean(group.spearman for group in self.groups)


def figures(
    dataset: Dataset, outcomes: Sequence[Outcome], family: str | None = None
) -> Figures:
    """Figures of all families together, or of one.

    Args:
        dataset: what was read.
        outcomes: one per run of the dataset.
        family: None: all.
    """
    mine = [one for one in outcomes if family is None or one.run.family == family]
    reasons: Counter[str] = Counter()
    for name, counts in dataset.out_of_scope.items():
        reasons.update(counts if family in (None, name) else {})
    return Figures(
        rows=sum(
            count for name, count in dataset.rows.items() if family in (None, name)
        ),
        in_scope=len(mine),
        out_of_scope=dict(reasons.most_common()),
        failures=sum(one.predicted is None for one in mine),
        time_left_out=sum(
            one.remarks.time_is_overhead and one.run.step_seconds is not None
            for one in mine
        ),
        time=errors_of(one.time_error for one in mine),
        memory=errors_of(one.memory_error for one in mine),
        activations=errors_of(one.activation_error for one in mine),
        decisions=decisions_of(mine),
        groups=rank_groups(mine),
    )


def errors_of(errors: Iterable[float | None]) -> Errors | None:
    """Summary of relative errors; None among them is no error; None when there are none."""
    signed = np.array([error for error in errors if error is not None], dtype=float)
    if not signed.size:
        return None
    sizes = np.abs(signed)
    median, p90 = np.percentile(sizes, (50, 90))
    return Errors(
        len(signed),
        float(median),
        float(sizes.mean()),
        float(p90),
        float(signed.mean()),
    )


def decisions_of(outcomes: Iterable[Outcome]) -> Decisions | None:
    """Fits or runs out; None when nothing can be judged."""
    judged = [one for one in outcomes if one.is_decided]
    if not judged:
        return None
    return Decisions(
        rows=len(judged),
        said_to_fit=sum(one.said_to_fit for one in judged),
        false_fits=sum(one.said_to_fit and one.run.ran_out for one in judged),
        false_refusals=sum(
            not one.said_to_fit and not one.run.ran_out for one in judged
        ),
    )


def rank_groups(outcomes: Iterable[Outcome]) -> tuple[RankGroup, ...]:
    """Every rank group of a family with at least `LEAST_RUNS` timed runs."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        if one.run.rank_group and one.time_error is not None and one.run.step_seconds:
            groups.setdefault((one.run.family, one.run.rank_group), []).append(one)
    enough = {name: runs for name, runs in groups.items() if len(runs) >= LEAST_RUNS}
    times = {name: _plan_times(runs) for name, runs in enough.items()}
    return tuple(
        RankGroup(
            f"{name[0]}: {name[1]}", len(runs), len(times[name]), *_ranking(times[name])
        )
        for name, runs in enough.items()
        if len(times[name]) > 1
    )


def _plan_times(runs: Iterable[Outcome]) -> list[tuple[float, float]]:
    """(predicted, measured) seconds of every plan, the medians of its runs."""
    plans: dict[tuple[Run, str], list[Outcome]] = {}
    for one in runs:
        plan = replace(
            one.run,
            source_id="",
            step_seconds=None,
            memory_bytes=None,
            memory_kind="allocated",
        )
        plans.setdefault((plan, one.remarks.words), []).append(one)
    return [
        (
            median(one.predicted_seconds for one in each),
            median(one.run.step_seconds or 0.0 for one in each),
        )
        for each in plans.values()
    ]


def _ranking(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Spearman's rank correlation, and regret."""
    predicted, measured = zip(*times, strict=True)
    chosen = max(real for said, real in times if said == min(predicted))
    return spearman(predicted, measured), chosen / min(measured)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation; zero when one side tells no two plans apart."""
    ranks = np.array([_ranks(left), _ranks(right)])
    if not ranks.std(axis=1).all():
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from zero; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=float)
    return [
        float((array < value).sum() + ((array == value).sum() - 1) / 2)
        for value in array
    ]


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def summary(found: Figures) -> dict[str, Any]:
    """The figures that every family and all together have, as JSON takes them; null: nothing to judge."""
    return {
        "rows": found.rows,
        "in_scope": found.in_scope,
        "time_mape": found.time and found.time.mean,
        "time_median_ape": found.time and found.time.median,
        "memory_mape": found.memory and found.memory.mean,
        "oom_accuracy": found.decisions and found.decisions.accuracy,
        "false_fit_rate": found.decisions and found.decisions.false_fit_rate,
        "mean_regret": found.mean_regret(),
        "spearman": found.spearman,
    }


def details(found: Figures) -> dict[str, Any]:
    """`summary`, and what else is known of a family."""
    return summary(found) | {
        "out_of_scope": found.out_of_scope,
        "failures": found.failures,
        "time_rows": found.time.rows if found.time else 0,
        "time_left_out": found.time_left_out,
        "time_p90": found.time and found.time.p90,
        "time_bias": found.time and found.time.bias,
        "memory_rows": found.memory.rows if found.memory else 0,
        "memory_median_ape": found.memory and found.memory.median,
        "memory_p90": found.memory and found.memory.p90,
        "memory_bias": found.memory and found.memory.bias,
        "oom_rows": found.decisions.rows if found.decisions else 0,
        "said_to_fit_but_ran_out": found.decisions.false_fits if found.decisions else 0,
        "said_not_to_fit_but_ran": found.decisions.false_refusals
        if found.decisions
        else 0,
        "rank_groups": len(found.groups),
    }
