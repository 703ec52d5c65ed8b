"""Tables of `benchmarks.fidelity`, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from benchmarks.published_runs import Published
from planner.calibrate.metrics import (
    Figures,
    Outcome,
    figures,
    figures_by,
    mean_coverage,
    median_of_medians,
)
from planner.cli.console import table
from planner.spec.units import gibibytes, percent, seconds

UNKNOWN = "-"
LONGEST_CAUSE = 70
ERRORS = (
    "time",
    "median",
    "mean",
    "p90",
    "bias",
    "in 80 %",
    "memory",
    "median",
    "mean",
    "bias",
)
DECISIONS = (
    "fit or not",
    "correct",
    "false fits",
    "groups",
    "mean regret",
    "Spearman",
)


def report_text(published: Published, found: Sequence[Outcome], worst: int) -> str:
    """Return all tables.

    Args:
        published: what was read.
        found: runs and predictions.
        worst: number of runs with the largest errors to list.
    """
    families = figures_by(found, "family")
    sources = figures_by(found, "source")
    kinds = figures_by(found, "kind")
    overall = figures(found)
    parts = [
        scope_text(published),
        errors_text("family", families | {"overall": overall}),
        errors_text("source", sources),
        errors_text("model, architecture, runtime", kinds),
        decisions_text("family", families | {"overall": overall}),
        _means_text(sources),
    ]
    if worst:
        parts.append(worst_text(found, worst, "time"))
        parts.append(worst_text(found, worst, "memory"))
    return "\n\n".join(part for part in parts if part)


def scope_text(published: Published) -> str:
    """Return how many scored rows are predicted, and why the others are not."""
    total = sum(published.rows.values())
    share = percent(published.in_scope)
    lines = [f"{len(published.runs):,} of {total:,} scored rows in scope ({share})"]
    reasons: Counter[str] = Counter()
    for counts in published.out_of_scope.values():
        reasons.update(counts)
    for reason, rows in reasons.most_common():
        lines.append(f"  {rows:5,}  {reason}")
    return "\n".join(lines)


def errors_text(title: str, parts: Mapping[str, Figures]) -> str:
    """Return a table of the errors of time and memory."""
    rows = [(name, *_error_cells(part)) for name, part in parts.items()]
    return table((title, *ERRORS), rows)


def _error_cells(part: Figures) -> tuple[str, ...]:
    time = part.time
    memory = part.memory
    of_time = (UNKNOWN,) * 5
    if time:
        sizes = (_percent(time.median), _percent(time.mean), _percent(time.p90))
        of_time = (str(time.runs), *sizes, _signed(time.bias))
    of_memory = (UNKNOWN,) * 4
    if memory:
        sizes = (_percent(memory.median), _percent(memory.mean), _signed(memory.bias))
        of_memory = (str(memory.runs), *sizes)
    return (*of_time, _percent(part.coverage_80), *of_memory)


def decisions_text(title: str, parts: Mapping[str, Figures]) -> str:
    """Return a table of decisions and rank groups; only parts that have either."""
    rows = []
    for name, part in parts.items():
        if part.decisions or part.groups:
            rows.append((name, *_decision_cells(part)))
    return table((title, *DECISIONS), rows) if rows else ""


def _decision_cells(part: Figures) -> tuple[str, ...]:
    decisions = part.decisions
    decided = (UNKNOWN,) * 3
    if decisions:
        accuracy = _percent(decisions.accuracy)
        false_fits = _percent(decisions.false_fit_rate)
        decided = (str(decisions.runs), accuracy, false_fits)
    groups = str(len(part.groups)) if part.groups else UNKNOWN
    return (*decided, groups, _ratio(part.mean_regret), _ratio(part.spearman))


def _means_text(sources: Mapping[str, Figures]) -> str:
    middle = _percent(median_of_medians(sources))
    covered = _percent(mean_coverage(sources))
    return (
        f"median of the sources' median errors of time: {middle}\n"
        f"mean over sources of the times within the interval of 80 %: {covered}"
    )


def worst_text(found: Sequence[Outcome], count: int, what: str) -> str:
    """Return a table of the runs with the largest errors.

    Args:
        found: runs and predictions.
        count: number of runs.
        what: ``time`` or ``memory``.
    """
    is_time = what == "time"
    written: Callable[[float], str] = seconds if is_time else gibibytes
    rows = []
    for error, one in _largest(found, is_time=is_time)[:count]:
        result = one.measured.run.result
        measured = result.step_seconds if is_time else result.memory_bytes
        name = one.measured.run.source.id
        cause = one.failure.replace("\n", " ")[:LONGEST_CAUSE]
        value = written(measured or 0)
        rows.append((name, one.measured.kind, value, _signed(error), cause))
    header = (f"largest errors of {what}", "kind", "measured", "error", "failure")
    return table(header, rows, left=(0, 1, 4)) if rows else ""


def _largest(found: Sequence[Outcome], *, is_time: bool) -> list[tuple[float, Outcome]]:
    errors = []
    for one in found:
        error = one.time_error if is_time else one.memory_error
        if error is not None:
            errors.append((error, one))
    return sorted(errors, key=lambda pair: -abs(pair[0]))


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else percent(value)


def _signed(value: float) -> str:
    return f"{100 * value:+.1f} %"


def _ratio(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"
