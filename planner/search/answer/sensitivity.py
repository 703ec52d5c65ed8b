"""Would another plan win within the error bars? The plan and its alternatives, priced with other figures.

    (Q1)  bandwidth or latency x (1 + c): the links of the cluster are changed, and the same stage maps priced again
    (Q2)  compute x (1 + c) takes as long as (1 + c) x what links of (1 + c) times the bandwidth and 1 / (1 + c) of the
          latency take, with the host's fixed times divided likewise; so it changes links too, those to the hosts
          among them                                                                              -> _repriced()
    (Q3)  the change at which an alternative overtakes: probes outwards in both directions, and the place between
          the last that it loses and the first that it wins                                        -> _overtaking()

Only the plan and its alternatives are priced: another layout may win before they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from planner.cost import Workload, choose, evaluate, layout_costs, workload
from planner.search.layouts.offloading import is_offloading_known
from planner.search.result import Candidate, Limits
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
_PIECES = 1024
"""In which the way to a probe is cut to tell where an alternative overtakes: finer than any figure is known."""
_BRIEF_ACTIONS = 400_000
"""Actions that may be simulated where the answer is to be brief."""

COUNTED_UNCERTAINTY = 0.1
FP8_UNCERTAINTY = 0.15
"""Of counted profiles in fp8: published runs held out by source are missed by that, on average (docs/concepts/
accuracy.md)."""
BANDWIDTH_UNCERTAINTY = 0.2
LATENCY_UNCERTAINTY = 0.5
_NOT_MEASURED = "assumed, the links were not measured (planner links measures them)"
_DATA_SHEET = "assumed, 80 % of the link's data sheet"


@dataclass(frozen=True, slots=True)
class _ErrorBar:
    """What may be wrong, and by how much."""

    quantity: Quantity
    uncertainty: float
    reason: str


class _TimeOverError(Exception):
    """Ends what is told from within."""


def sensitivity(
    candidates: Sequence[Candidate], limits: Limits, *, is_full: bool
) -> tuple[Sensitivity, ...]:
    """For every figure of the cost model: which alternatives overtake the plan when it is another.

    Args:
        candidates: the plan, then its alternatives.
        limits: of the time; figures for which there is none left are left out.
        is_full: look beyond the error bars too, and at steps of any length.
    """
    if len(candidates) < 2:
        return ()
    bars = _error_bars(candidates[0])
    actions = sum(sum(map(len, one.schedule.actions)) for one in candidates)
    if not is_full and 2 * len(bars) * actions > _BRIEF_ACTIONS:
        return ()
    found: list[Sensitivity] = []
    with suppress(_TimeOverError):
        for bar in bars:
            found.append(_sensitivity(bar, candidates, limits, is_full))
    return tuple(found)


def _sensitivity(
    bar: _ErrorBar, candidates: Sequence[Candidate], limits: Limits, is_full: bool
) -> Sensitivity:
    @cache
    def work(factor: float) -> Workload:
        return _repriced(candidates[0].costs.work, bar.quantity, factor)

    @cache
    def ticks(place: int, factor: float) -> int:
        if limits.should_stop():
            raise _TimeOverError
        one = candidates[place]
        costs = layout_costs(work(factor), one.costs.layout)
        return evaluate(costs, one.schedule, choose(costs, one.stage_map)).total_ticks

    def change_of(place: int) -> float | None:
        return _overtaking(
            lambda factor: ticks(place, factor) - ticks(0, factor), reach
        )

    reach = (1 + bar.uncertainty, 2.0, FAR) if is_full else (1 + bar.uncertainty,)
    changes = ((place - 1, change_of(place)) for place in range(1, len(candidates)))
    found = [
        Overtaking(alternative=place, change=change)
        for place, change in changes
        if change is not None
    ]
    found.sort(key=lambda one: (abs(one.change), one.alternative))
    return Sensitivity(
        quantity=bar.quantity,
        uncertainty=bar.uncertainty,
        reason=bar.reason,
        overtakes=tuple(found),
        holds=all(abs(one.change) > bar.uncertainty for one in found),
    )


def _overtaking(behind: Callable[[float], int], reach: Sequence[float]) -> float | None:
    """The least change, up or down, at which an alternative wins: (Q3); None: at none of the probes.

    Args:
        behind: ticks by which the plan is faster, by factor; the alternative wins where they are negative.
        reach: factors of the probes.
    """
    changes = []
    for up in (True, False):
        lost = 1.0
        for far in sorted(set(reach)):
            factor = far if up else _down(far)
            if behind(factor) < 0:
                changes.append(_between(behind, lost, factor) - 1)
                break
            lost = factor
    return min(changes, key=abs) if changes else None


def _down(far: float) -> float:
    """20 % less beside 20 % more; beyond 100 %, a quarter beside four times as much."""
    return max(2 - far, 1 / FAR) if far < 2 else 1 / far


def _between(behind: Callable[[float], int], lost: float, won: float) -> float:
    """The first of the factors between both, in `_PIECES` equal pieces, that wins: as bisection has it, but asked where
    a straight line between what is known crosses 0 (Ford 1995, the Illinois method), which takes a third of the work.
    """
    low, high = 0, _PIECES
    ahead, late = float(behind(lost)), -float(behind(won))
    was_high: bool | None = None
    while high - low > 1:
        piece = min(
            max(low + round((high - low) * ahead / (ahead + late)), low + 1), high - 1
        )
        found = behind(_factor(lost, won, piece))
        is_high = found < 0
        if is_high:  # an end that stays twice counts half
            high, late, ahead = (
                piece,
                -float(found),
                ahead / (2 if was_high is True else 1),
            )
        else:
            low, ahead, late = (
                piece,
                float(found),
                late / (2 if was_high is False else 1),
            )
        was_high = is_high
    return _factor(lost, won, high)


def _factor(lost: float, won: float, piece: int) -> float:
    """Where a piece ends; by halving, so that it is the same whichever pieces were asked for before."""
    low, high = 0, _PIECES
    while piece not in (low, high):
        middle = (low + high) // 2
        half = (lost + won) / 2
        low, lost, high, won = (
            (middle, half, high, won) if piece >= middle else (low, lost, middle, half)
        )
    return lost if piece == low else won


def _repriced(work: Workload, quantity: Quantity, factor: float) -> Workload:
    """The workload with one figure `factor` times as large: (Q1), or as (Q2) has it."""
    bandwidth, latency, host, constants = (1.0, 1.0), 1.0, 1.0, work.constants
    match quantity:
        case "compute_seconds":
            bandwidth, latency, host = (factor, factor), 1 / factor, factor
            constants = replace(
                constants,
                collective_seconds=constants.collective_seconds / factor,
                transfer_seconds=constants.transfer_seconds / factor,
                step_seconds=constants.step_seconds / factor,
            )
        case "intra_node_bandwidth":
            bandwidth = (factor, 1.0)
        case "inter_node_bandwidth":
            bandwidth = (1.0, factor)
        case "latency_seconds":
            latency = factor
        case "host_bandwidth":
            host = factor
    cluster = _with_hosts(_with_links(work.cluster, bandwidth, latency), host)
    return workload(
        work.profile, cluster, work.job, framework=work.framework, constants=constants
    )


def _with_links(
    cluster: Cluster, bandwidth: tuple[float, float], latency: float
) -> Cluster:
    """Links inside and between the nodes with so many times their bandwidth and latency."""
    groups = []
    for group in cluster.node_groups:
        intra, inter = links_of(group, is_alone=len(cluster.node_groups) == 1)
        changed = {
            "intra_node": _scaled(intra, bandwidth[0], latency),
            "inter_node": _scaled(inter, bandwidth[1], latency) if inter else None,
        }
        groups.append(group.model_copy(update=changed))
    return cluster.model_copy(update={"node_groups": tuple(groups)})


def _with_hosts(cluster: Cluster, bandwidth: float) -> Cluster:
    """Links to the hosts with so many times their bandwidth, where something may be offloaded there."""
    groups = []
    for group in cluster.node_groups:
        device = find_device(group.device)
        known = device.host_bandwidth_bytes_per_second
        if known is not None and group.host_memory_bytes is not None:
            changed = device.model_copy(
                update={"host_bandwidth_bytes_per_second": known * bandwidth}
            )
            group = group.model_copy(update={"device": changed})
        groups.append(group)
    return cluster.model_copy(update={"node_groups": tuple(groups)})


def _scaled(link: Link, bandwidth: float, latency: float) -> Link:
    return link.model_copy(
        update={
            "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second * bandwidth,
            "latency_seconds": link.latency_seconds * latency,
        }
    )


def _error_bars(best: Candidate) -> tuple[_ErrorBar, ...]:
    """What to expect of every figure: as measured, else as stated."""
    work = best.costs.work
    bars = [_ErrorBar("compute_seconds", *_compute_error(best))]
    intra, inter = work.intra_node, work.inter_node
    if work.devices_per_node > 1:
        bars.append(
            _ErrorBar(
                "intra_node_bandwidth", *_link_error(intra, BANDWIDTH_UNCERTAINTY)
            )
        )
    if inter is not None and (work.nodes > 1 or work.groups):
        bars.append(
            _ErrorBar(
                "inter_node_bandwidth", *_link_error(inter, BANDWIDTH_UNCERTAINTY)
            )
        )
    if work.devices > 1:
        bars.append(
            _ErrorBar(
                "latency_seconds", *_link_error(inter or intra, LATENCY_UNCERTAINTY)
            )
        )
    if is_offloading_known(work):
        bars.append(_ErrorBar("host_bandwidth", BANDWIDTH_UNCERTAINTY, _DATA_SHEET))
    return tuple(bars)


def _compute_error(best: Candidate) -> tuple[float, str]:
    """The largest spread of the measured rows that the plan stands on."""
    work, layout = best.costs.work, best.costs.layout
    degrees = (
        layout.tensor_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
    )
    rows = work.sizes[(layout.micro_batch_size, *degrees, layout.sequence_parallel)]
    spreads = [
        row.relative_spread
        for options in rows
        for row in options.values()
        if row.relative_spread is not None
    ]
    if spreads:
        return max(spreads), "the widest spread of the plan's measured rows"
    if any(row.source == "measured" for options in rows for row in options.values()):
        return (
            COUNTED_UNCERTAINTY,
            "assumed, the profile has no spread of its samples",
        )
    if work.casts is not None:
        return (
            FP8_UNCERTAINTY,
            "assumed, the profile is counted, and few published runs have fp8 matrix products",
        )
    return (
        COUNTED_UNCERTAINTY,
        "assumed, the profile is counted and not measured (planner profile measures it)",
    )


def _link_error(link: Link, otherwise: float) -> tuple[float, str]:
    residuals = [fit.relative_residual for fit in link.fits]
    if link.relative_residual is not None:
        residuals.append(link.relative_residual)
    return (
        (max(residuals), "the residual of the links' fit")
        if residuals
        else (otherwise, _NOT_MEASURED)
    )
