"""The Pareto front: step time against devices and memory per device, with what a token costs.

    (O1)  devices: all, and as many nodes as divide the cluster's nodes; below one node, as many devices as divide its
          own; of several node groups that of the first, and whole groups in every order that is tried  -> _parts()
    (O2)  memory: all that the job may use of a device, three quarters, a half and a quarter of it    -> SHARES
    (O3)  for each, fewest devices first, the fastest plan; it must be faster than what fewer devices with no more
          memory reach. A plan that needs no more than a smaller share is the fastest of that too       -> front()
    (O4)  what another point beats or equals in step, devices and peak at once is left out            -> _undominated()

Every point is proven; what the time limit leaves unproven is no point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.cost import TICK_SECONDS, Workload, choose, rank_memory, workload
from planner.search.layouts.space import space_of
from planner.search.parts import Part, arrangements, parts_of, token_price
from planner.search.result import Callbacks, Candidate, Limits
from planner.search.solve import advance, begin
from planner.search.stage_maps.inside import NO_LIMIT
from planner.spec.cluster import Cluster
from planner.spec.job import Job
from planner.spec.plan import Options, ParetoPoint, PlanRequest
from planner.spec.profile import ModelProfile

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the memory that the job may use."""


def front(
    profile: ModelProfile, request: PlanRequest, limits: Limits
) -> tuple[tuple[ParetoPoint, ...], bool]:
    """The points that no other beats, most devices first; and whether all were looked at.

    Args:
        profile: of the model.
        request: whole cluster, job and calibration.
        limits: of the time.
    """
    points: list[ParetoPoint] = []
    for orders in _parts(request.cluster):
        for point in _of_part(profile, orders, request, tuple(points), limits):
            if point is None:
                return _undominated(points), False
            points.append(point)
    return _undominated(points), True


def _parts(cluster: Cluster) -> tuple[tuple[Part, ...], ...]:
    """Parts by (O1), fewest devices first, each in every order of its node groups that is tried."""
    nodes = sum(group.nodes for group in cluster.node_groups)
    per_node = cluster.node_groups[0].devices_per_node
    wanted = {tuple(range(count)) for count in _divisors(nodes)}
    several = len(cluster.node_groups) > 1
    orders: dict[frozenset[int], list[Part]] = {}
    for each in arrangements(cluster) if several else ():
        orders.setdefault(frozenset(each.groups), []).append(each)
    first = [
        (part,)
        for part in parts_of(cluster)
        if part.nodes in wanted
        and (len(part.nodes) > 1 or per_node % part.devices == 0)
        and not (several and part.nodes not in _inside_first(cluster))
    ]
    return tuple(
        sorted([*first, *map(tuple, orders.values())], key=lambda same: same[0].devices)
    )


def _inside_first(cluster: Cluster) -> set[tuple[int, ...]]:
    """Nodes of parts that the first of several node groups holds, and more."""
    return {tuple(range(count)) for count in range(1, cluster.node_groups[0].nodes + 1)}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _of_part(
    profile: ModelProfile,
    orders: tuple[Part, ...],
    request: PlanRequest,
    known: tuple[ParetoPoint, ...],
    limits: Limits,
) -> Iterator[ParetoPoint | None]:
    """Points of one part, most memory first: (O3); None and no more once the search was stopped."""
    peak, part = math.inf, orders[0]
    job, calibration = request.job, request.calibration
    for share in SHARES:
        whole = workload(profile, part.cluster, job, calibration=calibration)
        lean = _with_share(whole, job, share)
        leaner = workload(profile, part.cluster, lean, calibration=calibration)
        capacity = leaner.capacity_bytes
        if peak <= capacity:
            continue
        ceiling = min(
            (one.step_seconds for one in known if one.peak_bytes <= capacity),
            default=None,
        )
        found, is_proven = _fastest(leaner, orders, lean, ceiling, limits)
        if not is_proven:
            yield None
            return
        if found is not None:
            point = _point(found, part, job)
            peak = point.peak_bytes
            yield point
        elif ceiling is None:  # nothing fits, let alone with less
            return


def _with_share(work: Workload, job: Job, share: float) -> Job:
    """The job that may use a share of the memory that it might."""
    kept = float(work.device.memory_bytes - int(share * work.capacity_bytes))
    if work.groups:  # a fraction means the same on every kind of device; bytes are held to the smallest
        least = min(group.device.memory_bytes for group in work.groups)
        headroom = work.headroom if work.headroom < 1 else work.headroom / least
        kept = 1 - share * (1 - headroom)
    return job.model_copy(update={"memory_headroom": kept}) if share < 1 else job


def _fastest(
    priced: Workload,
    orders: tuple[Part, ...],
    job: Job,
    ceiling_seconds: float | None,
    limits: Limits,
) -> tuple[Candidate | None, bool]:
    """The fastest plan of a part below a ceiling, in any order of its node groups, and whether that is proven."""
    best, ceiling = (
        None,
        NO_LIMIT if ceiling_seconds is None else round(ceiling_seconds / TICK_SECONDS),
    )
    for part in orders:
        work = workload(
            priced.profile, part.cluster, job, calibration=priced.calibration
        )
        state = begin(
            work,
            space_of(work),
            Options(),
            Callbacks(should_stop=limits.should_stop),
            ceiling,
        )
        state.deadline = limits.deadline
        while state.is_open and state.seconds_left() > 0:
            advance(state)
        best, ceiling = state.best or best, state.limit_ticks
        if not state.is_proven:
            return best, False
    return best, True


def _point(found: Candidate, part: Part, job: Job) -> ParetoPoint:
    memory = rank_memory(
        found.costs, found.schedule, choose(found.costs, found.stage_map)
    )
    seconds = found.ticks * TICK_SECONDS
    return ParetoPoint(
        devices=part.devices,
        layout=found.layout,
        micro_batches=found.costs.micro_batches,
        layers_per_stage=tuple(map(len, found.stage_map)),
        step_seconds=seconds,
        peak_bytes=max(row.peak_bytes for row in memory),
        cost_per_token=token_price(part.cluster, job, seconds),
    )


def _undominated(points: list[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """By (O4), most devices first, then fastest."""
    kept: list[ParetoPoint] = []
    for one in sorted(points, key=_figures):
        if not any(_beats(other, one) for other in kept):
            kept.append(one)
    return tuple(sorted(kept, key=lambda one: (-one.devices, one.step_seconds)))


def _figures(point: ParetoPoint) -> tuple[int, float, int]:
    return point.devices, point.step_seconds, point.peak_bytes


def _beats(one: ParetoPoint, other: ParetoPoint) -> bool:
    return all(
        here <= there
        for here, there in zip(_figures(one), _figures(other), strict=True)
    )
