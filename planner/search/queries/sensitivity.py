"""Does another plan win within the errors of the figures? Candidates priced again.

Bandwidth or latency times a factor
    The links of the cluster change, and the same stage maps are priced again.
Compute times a factor
    Takes as long as the factor times the step with links of so many times the bandwidth
    and 1 / factor of the latency, and with the host's fixed times divided by it.

Only the plan and its alternatives are priced: another layout may win before they do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.cost import Workload, choose, evaluate, layout_costs, workload
from planner.cost.layers import rows_of
from planner.search.engine.offloading import is_offloading_known
from planner.search.result import Limits, Solution
from planner.spec.cluster import Cluster, Link
from planner.spec.devices import find_device, links_of
from planner.spec.plan import Overtaking, Sensitivity

Quantity = Literal[
    "compute_seconds",
    "intra_node_bandwidth",
    "inter_node_bandwidth",
    "latency_seconds",
    "host_bandwidth",
]
FAR = 4.0
"""Factor up to which changes are looked at."""
FULL_HALVINGS = 10
"""Of the way between a factor at which the plan wins and one at which it loses."""
BRIEF_HALVINGS = 6
"""The same without `Options.explain` ``full``."""
BRIEF_ACTIONS = 400_000
"""Simulated actions without `Options.explain` ``full``; nothing is priced above."""

COUNTED_UNCERTAINTY = 0.1
FP8_UNCERTAINTY = 0.15
"""Of counted profiles in fp8: mean error of published runs held out by source
(docs/concepts/accuracy.md)."""
BANDWIDTH_UNCERTAINTY = 0.2
LATENCY_UNCERTAINTY = 0.5
_NOT_MEASURED = "assumed, the links were not measured (planner links measures them)"
_DATA_SHEET = "assumed, 80 % of the link's data sheet"


@dataclass(frozen=True, slots=True)
class ErrorBar:
    """The expected relative error of a quantity, and its source."""

    quantity: Quantity
    uncertainty: float
    reason: str


def sensitivity(
    candidates: Sequence[Solution], limits: Limits, *, is_full: bool
) -> tuple[Sensitivity, ...]:
    """Return for every quantity which alternatives overtake the plan if it changes.

    Args:
        candidates: the plan, then its alternatives.
        limits: when to stop; quantities that are left by then are missing.
        is_full: look beyond the expected errors, and at steps of any length.
    """
    if len(candidates) < 2:
        return ()
    bars = error_bars(candidates[0])
    actions = sum(sum(map(len, one.schedule.actions)) for one in candidates)
    if not is_full and 2 * len(bars) * actions > BRIEF_ACTIONS:
        return ()
    found: list[Sensitivity] = []
    for bar in bars:
        one = _sensitivity(bar, candidates, limits, is_full=is_full)
        if one is None:
            break
        found.append(one)
    return tuple(found)


def _sensitivity(
    bar: ErrorBar, candidates: Sequence[Solution], limits: Limits, *, is_full: bool
) -> Sensitivity | None:
    """Return the alternatives that overtake; None: the time is over."""
    reach, halvings = [1 + bar.uncertainty], BRIEF_HALVINGS
    if is_full:
        reach, halvings = sorted({1 + bar.uncertainty, 2.0, FAR}), FULL_HALVINGS
    changed = _Changed(candidates, bar.quantity, halvings)
    found: list[Overtaking] = []
    for place in range(1, len(candidates)):
        if limits.should_stop():
            return None
        change = changed.overtaking(place, reach)
        if change is not None:
            found.append(Overtaking(alternative=place - 1, change=change))
    found.sort(key=lambda one: (abs(one.change), one.alternative))
    return Sensitivity(
        quantity=bar.quantity,
        uncertainty=bar.uncertainty,
        reason=bar.reason,
        overtakes=tuple(found),
        holds=all(abs(one.change) > bar.uncertainty for one in found),
    )


@dataclass
class _Changed:
    """Steps of the candidates with one quantity changed by a factor."""

    candidates: Sequence[Solution]
    quantity: Quantity
    halvings: int
    works: dict[float, Workload] = field(default_factory=dict)
    steps: dict[tuple[int, float], int] = field(default_factory=dict)

    def step(self, place: int, factor: float) -> int:
        """Return nanoseconds of a candidate's step."""
        if (place, factor) not in self.steps:
            one = self.candidates[place]
            costs = layout_costs(self._work(factor), one.costs.layout)
            step = evaluate(costs, one.schedule, choose(costs, one.stage_map))
            self.steps[place, factor] = step.total_ticks
        return self.steps[place, factor]

    def _work(self, factor: float) -> Workload:
        if factor not in self.works:
            work = self.candidates[0].costs.work
            self.works[factor] = repriced(work, self.quantity, factor)
        return self.works[factor]

    def wins(self, place: int, factor: float) -> bool:
        """Return whether an alternative is faster than the plan."""
        return self.step(place, factor) < self.step(0, factor)

    def overtaking(self, place: int, reach: Sequence[float]) -> float | None:
        """Return the smallest change, up or down, at which an alternative wins.

        Args:
            place: of the alternative.
            reach: factors above 1 to look at, in ascending order.

        Returns:
            None if it wins at none of them.
        """
        changes: list[float] = []
        for factors in (reach, [_down(factor) for factor in reach]):
            lost = 1.0
            for factor in factors:
                if self.wins(place, factor):
                    changes.append(self._first_win(place, lost, factor) - 1)
                    break
                lost = factor
        return min(changes, key=abs) if changes else None

    def _first_win(self, place: int, lost: float, won: float) -> float:
        """Return the factor nearest to `lost` at which an alternative wins."""
        for _ in range(self.halvings):
            middle = (lost + won) / 2
            if self.wins(place, middle):
                won = middle
            else:
                lost = middle
        return won


def _down(factor: float) -> float:
    """Return 20 % less for 20 % more; above 100 % more, a quarter for four times."""
    if factor < 2:
        return max(2 - factor, 1 / FAR)
    return 1 / factor


def repriced(work: Workload, quantity: Quantity, factor: float) -> Workload:
    """Return the workload with one quantity `factor` times as large.

    Compute cannot change by itself here: everything else is divided by the factor, so
    that all steps are 1 / factor of those with slower compute, in the same order.
    """
    intra = inter = latency = host = 1.0
    constants = work.constants
    match quantity:
        case "compute_seconds":
            intra = inter = host = factor
            latency = 1 / factor
            constants = replace(
                constants,
                collective_seconds=constants.collective_seconds / factor,
                transfer_seconds=constants.transfer_seconds / factor,
                step_seconds=constants.step_seconds / factor,
            )
        case "intra_node_bandwidth":
            intra = factor
        case "inter_node_bandwidth":
            inter = factor
        case "latency_seconds":
            latency = factor
        case "host_bandwidth":
            host = factor
    cluster = _with_links(work.cluster, intra, inter, latency)
    cluster = _with_host_links(cluster, host)
    return workload(
        work.profile, cluster, work.job, framework=work.framework, constants=constants
    )


def _with_links(
    cluster: Cluster, intra: float, inter: float, latency: float
) -> Cluster:
    """Return the cluster with other bandwidths and latencies between its devices."""
    groups = []
    for group in cluster.node_groups:
        inside, between = links_of(group, is_alone=len(cluster.node_groups) == 1)
        changed = {
            "intra_node": _scaled(inside, intra, latency),
            "inter_node": _scaled(between, inter, latency) if between else None,
        }
        groups.append(group.model_copy(update=changed))
    return cluster.model_copy(update={"node_groups": tuple(groups)})


def _with_host_links(cluster: Cluster, bandwidth: float) -> Cluster:
    """Return the cluster with another bandwidth to hosts whose memory is known."""
    groups = []
    for group in cluster.node_groups:
        device = find_device(group.device)
        known = device.host_bandwidth_bytes_per_second
        if known is not None and group.host_memory_bytes is not None:
            fields = {"host_bandwidth_bytes_per_second": known * bandwidth}
            changed = device.model_copy(update=fields)
            group = group.model_copy(update={"device": changed})
        groups.append(group)
    return cluster.model_copy(update={"node_groups": tuple(groups)})


def _scaled(link: Link, bandwidth: float, latency: float) -> Link:
    fields = {
        "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second * bandwidth,
        "latency_seconds": link.latency_seconds * latency,
    }
    return link.model_copy(update=fields)


def error_bars(best: Solution) -> tuple[ErrorBar, ...]:
    """Return the expected error of every quantity: measured, else assumed."""
    return tuple(_error_bars(best))


def _error_bars(best: Solution) -> Iterator[ErrorBar]:
    work = best.costs.work
    intra, inter = work.intra_node, work.inter_node
    yield ErrorBar("compute_seconds", *_compute_error(best))
    if work.devices_per_node > 1:
        error = _link_error(intra, BANDWIDTH_UNCERTAINTY)
        yield ErrorBar("intra_node_bandwidth", *error)
    if inter is not None and work.nodes > 1:
        error = _link_error(inter, BANDWIDTH_UNCERTAINTY)
        yield ErrorBar("inter_node_bandwidth", *error)
    if work.devices > 1:
        error = _link_error(inter or intra, LATENCY_UNCERTAINTY)
        yield ErrorBar("latency_seconds", *error)
    if is_offloading_known(work):
        yield ErrorBar("host_bandwidth", BANDWIDTH_UNCERTAINTY, _DATA_SHEET)


def _compute_error(best: Solution) -> tuple[float, str]:
    """Return the largest spread of the measured rows that the plan uses, or a guess."""
    work, layout = best.costs.work, best.costs.layout
    rows = [row for options in rows_of(work, layout) for row in options.values()]
    spreads = [row.relative_spread for row in rows if row.relative_spread is not None]
    is_derived = any(row.source == "derived" for row in rows)
    if spreads and is_derived:
        return max(spreads), (
            "the widest error of seconds that are derived from other measured sizes"
        )
    if spreads:
        return max(spreads), "the widest spread of the plan's measured rows"
    if is_derived:
        reason = "assumed, seconds are derived from the only measured size"
        return COUNTED_UNCERTAINTY, reason
    if any(row.source == "measured" for row in rows):
        reason = "assumed, the profile has no spread of its samples"
        return COUNTED_UNCERTAINTY, reason
    if work.casts is not None:
        reason = (
            "assumed, the profile is counted, and few published runs have fp8 matrix "
            "products"
        )
        return FP8_UNCERTAINTY, reason
    reason = (
        "assumed, the profile is counted and not measured (planner profile measures it)"
    )
    return COUNTED_UNCERTAINTY, reason


def _link_error(link: Link, otherwise: float) -> tuple[float, str]:
    """Return the largest residual of a link's fits, or an assumed error."""
    residuals = [fit.relative_residual for fit in link.fits]
    if link.relative_residual is not None:
        residuals.append(link.relative_residual)
    if residuals:
        return max(residuals), "the residual of the links' fit"
    return otherwise, _NOT_MEASURED
