"""What `benchmarks.fidelity` prints: figures by family, targets beside what was reached, the worst rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from planner.cli.console import table
from planner.fidelity.metrics import (
    Errors,
    Figures,
    Outcome,
    decisions_of,
    errors_of,
    rank_groups,
)
from planner.spec.units import gibibytes, seconds

UNKNOWN = "-"
LEAST_RUNS = 5
"""Of the rank groups whose mean regret has a target."""
ALLOCATED = ("nanotron", "kempner", "vocab_parallel", "megatron_golden")
Choice = Callable[[Outcome], bool]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach."""

    name: str
    limit: float
    reached: float | None
    """None: no such rows."""
    rows: int
    at_least: bool = False
    as_ratio: bool = False

    @property
    def is_met(self) -> bool | None:
        """None: no such rows."""
        if self.reached is None:
            return None
        return (
            self.reached >= self.limit if self.at_least else self.reached <= self.limit
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Of the table's row."""
        sign = ">=" if self.at_least else "<="
        met = {True: "yes", False: "no", None: UNKNOWN}[self.is_met]
        return (
            self.name,
            f"{sign} {self._written(self.limit)}",
            self._written(self.reached),
            met,
            str(self.rows),
        )

    def _written(self, value: float | None) -> str:
        if value is None:
            return UNKNOWN
        return f"{value:.3f}" if self.as_ratio else f"{100 * value:.1f} %"


def targets(outcomes: Sequence[Outcome]) -> list[Target]:
    """The targets of step time, order, memory and fitting, and what was reached."""
    single = _errors(
        outcomes, "time", lambda one: _is(one, "vtrain") and one.run.nodes == 1
    )
    multi = _errors(
        outcomes, "time", lambda one: _is(one, "vtrain") and one.run.nodes > 1
    )
    found = [
        _mape("vtrain, one node: time MAPE", 0.05, single),
        _mape("vtrain, many nodes: time MAPE", 0.07, multi),
    ]
    for family in (
        "aleph_alpha",
        "papers",
        "lucie",
        "nanotron",
        "kempner",
        "torchtitan",
        "mosaic",
    ):
        errors = _errors(outcomes, "time", partial(_is, family=family))
        median = errors.median if errors else None
        found.append(
            Target(
                f"{family}: time, median error",
                0.06,
                median,
                errors.rows if errors else 0,
            )
        )
    groups = [group for group in rank_groups(outcomes) if group.runs >= LEAST_RUNS]
    regret = sum(group.regret for group in groups) / len(groups) if groups else None
    found.append(
        Target(
            "mean regret, groups of 5 runs or more",
            1.03,
            regret,
            len(groups),
            as_ratio=True,
        )
    )
    found.append(
        _mape(
            "memory MAPE, torch allocated",
            0.04,
            _errors(outcomes, "memory", _is_allocated),
        )
    )
    found.append(
        _mape(
            "Korthikanti: activations MAPE",
            0.015,
            _errors(outcomes, "activation", lambda one: True),
        )
    )
    return [*found, *_fit_targets(outcomes)]


def _fit_targets(outcomes: Sequence[Outcome]) -> tuple[Target, Target]:
    name, limit = "runs out of memory: accuracy", 0.97
    decided = decisions_of(outcomes)
    if decided is None:
        return Target(name, limit, None, 0, at_least=True), Target(
            "said to fit but ran out", 0.01, None, 0
        )
    return (
        Target(name, limit, decided.accuracy, decided.rows, at_least=True),
        Target(
            "said to fit but ran out", 0.01, decided.false_fit_rate, decided.said_to_fit
        ),
    )


def _is(one: Outcome, family: str) -> bool:
    return one.run.family.startswith(family)


def _is_allocated(one: Outcome) -> bool:
    """Memory as torch counted it; of the papers that of Zero Bubble, which alone was measured."""
    return any(map(one.run.family.startswith, ALLOCATED)) or (
        _is(one, "papers") and not one.remarks.is_modelled
    )


def _errors(outcomes: Sequence[Outcome], what: str, chosen: Choice) -> Errors | None:
    return errors_of(getattr(one, f"{what}_error") for one in outcomes if chosen(one))


def _mape(name: str, limit: float, errors: Errors | None) -> Target:
    return Target(
        name, limit, errors.mean if errors else None, errors.rows if errors else 0
    )


def targets_text(found: Sequence[Target]) -> str:
    """The table of targets."""
    return table(
        ("target", "limit", "reached", "met", "rows"), [one.cells for one in found]
    )


def figures_text(found: dict[str, Figures]) -> str:
    """One row per family: rows, time, memory, decisions, order."""
    header = (
        "family",
        "rows",
        "in scope",
        "time median",
        "MAPE",
        "p90",
        "bias",
        "memory median",
        "MAPE",
        "p90",
        "bias",
    )
    rows = [
        (name, str(one.rows), str(one.in_scope), *_cells(one.time), *_cells(one.memory))
        for name, one in found.items()
    ]
    judged = (
        "family",
        "decided",
        "right",
        "false fits",
        "false refusals",
        "groups",
        "Spearman",
        "regret",
    )
    decided = [
        (name, *_decision_cells(one), *_order_cells(one))
        for name, one in found.items()
        if one.decisions is not None or one.groups
    ]
    return "\n\n".join([table(header, rows), table(judged, decided), *_left_out(found)])


def _cells(errors: Errors | None) -> tuple[str, ...]:
    if errors is None:
        return (UNKNOWN,) * 4
    sizes = (
        f"{100 * value:.1f} %" for value in (errors.median, errors.mean, errors.p90)
    )
    return (*sizes, f"{100 * errors.bias:+.1f} %")


def _decision_cells(one: Figures) -> tuple[str, ...]:
    made = one.decisions
    if made is None:
        return ("0", UNKNOWN, UNKNOWN, UNKNOWN)
    return (
        str(made.rows),
        f"{made.accuracy:.1%}",
        f"{made.false_fits} of {made.said_to_fit}",
        str(made.false_refusals),
    )


def _order_cells(one: Figures) -> tuple[str, ...]:
    regret, correlation = one.mean_regret(), one.spearman
    if regret is None or correlation is None:
        return ("0", UNKNOWN, UNKNOWN)
    return str(len(one.groups)), f"{correlation:.3f}", f"{regret:.3f}"


def _left_out(found: dict[str, Figures]) -> list[str]:
    """Rows that no figure counts, with the reason."""
    rows = [
        (name, str(count), reason)
        for name, one in found.items()
        for reason, count in (
            *one.out_of_scope.items(),
            (
                "time is overhead by the row's own notes: in no time figure",
                one.time_left_out,
            ),
        )
        if count
    ]
    return (
        [table(("family", "rows", "out of scope, or left out"), rows, left=(0, 2))]
        if rows
        else []
    )


def worst_text(outcomes: Sequence[Outcome], count: int) -> str:
    """The rows whose step time is furthest off."""
    timed = [one for one in outcomes if one.time_error is not None]
    timed.sort(key=lambda one: -abs(one.time_error or 0.0))
    header = ("worst in time", "measured", "predicted", "error", "what ran")
    rows = [
        (
            f"{one.run.family} {one.run.source_id}",
            seconds(one.run.step_seconds or 0.0),
            seconds(one.predicted_seconds),
            f"{one.time_error:+.1%}",
            described(one),
        )
        for one in timed[:count]
    ]
    return table(header, rows, left=(0, 4))


def described(one: Outcome) -> str:
    """Model, layout and place of a run, and what the prediction holds to be the largest part of its step."""
    run, layout = one.run, one.run.layout
    words = [
        f"{run.shape.layers} layers of {run.shape.hidden}, length {run.sequence_length}",
        f"data {layout.data_parallel_degree} x tensor {layout.tensor_parallel_degree} x "
        f"pipeline {layout.pipeline_parallel_degree}, micro-batch {layout.micro_batch_size}, "
        f"batch {run.global_batch_size}, {layout.schedule}, ZeRO {layout.zero_stage}, recompute {run.recompute}",
        f"{run.framework.name} on {run.nodes} x {run.devices_per_node} {run.device}",
    ]
    if one.predicted is not None:
        parts = one.predicted.prediction.breakdown.model_dump()
        most = max(parts, key=lambda name: parts[name])
        words.append(f"mostly {most.removesuffix('_seconds').replace('_', ' ')}")
    return "; ".join(words)


def failures_text(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per run in scope that could not be predicted."""
    return [
        f"failed: {one.run.family} {one.run.source_id}: {one.failure} (counts as a prediction of zero)"
        for one in outcomes
        if one.predicted is None
    ]


def worst_memory_text(outcomes: Sequence[Outcome], count: int) -> str:
    """The rows whose memory is furthest off."""
    held = [one for one in outcomes if one.memory_error is not None]
    held.sort(key=lambda one: -abs(one.memory_error or 0.0))
    rows = [
        (
            f"{one.run.family} {one.run.source_id}",
            gibibytes(one.run.memory_bytes or 0.0),
            gibibytes(one.predicted.memory_bytes if one.predicted else 0.0),
            f"{one.memory_error:+.1%}",
            f"{one.run.memory_kind}; {described(one)}",
        )
        for one in held[:count]
    ]
    return table(
        ("worst in memory", "measured", "predicted", "error", "what ran"),
        rows,
        left=(0, 4),
    )
