"""The Pareto front: step time against devices and memory per device, with what a token costs.

    (O1)  devices: all, and as many nodes as divide the cluster's nodes; below one node, as many devices as divide its
          own; the first groups of several                                                            -> _parts()
    (O2)  memory: all that the job may use of a device, three quarters, a half and a quarter of it    -> SHARES
    (O3)  for each, fewest devices first, the fastest plan; it must be faster than what fewer devices with no more
          memory reach. A plan that needs no more than a smaller share is the fastest of that too       -> front()
    (O4)  what another point beats or equals in step, devices and peak at once is left out            -> _undominated()

Every point is proven; what the time limit leaves unproven is no point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from planner.cost import TICK_SECONDS, choose, rank_memory, workload
from planner.search.explain import with_recompute
from planner.search.inside import NO_LIMIT
from planner.search.parts import Part, parts_of, token_price
from planner.search.result import Callbacks, Candidate, Limits
from planner.search.solve import advance, begin
from planner.search.space import space_of
from planner.spec.cluster import Cluster
from planner.spec.job import Job
from planner.spec.plan import Options, ParetoPoint
from planner.spec.profile import ModelProfile

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the memory that the job may use."""


def front(profile: ModelProfile, cluster: Cluster, job: Job, limits: Limits) -> tuple[tuple[ParetoPoint, ...], bool]:
    """The points that no other beats, most devices first; and whether all were looked at.

    Args:
        profile: of the model.
        cluster: whole.
        job: what is to be trained.
        limits: of the time.
    """
    points: list[ParetoPoint] = []
    for part in _parts(cluster):
        for point in _of_part(profile, part, job, tuple(points), limits):
            if point is None:
                return _undominated(points), False
            points.append(point)
    return _undominated(points), True


def _parts(cluster: Cluster) -> tuple[Part, ...]:
    """Parts by (O1), fewest devices first."""
    nodes = sum(group.nodes for group in cluster.node_groups)
    per_node = cluster.node_groups[0].devices_per_node
    wanted = {tuple(range(count)) for count in _divisors(nodes)}
    return tuple(
        part
        for part in parts_of(cluster)
        if part.nodes in wanted and (len(part.nodes) > 1 or per_node % part.devices == 0)
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _of_part(
    profile: ModelProfile, part: Part, job: Job, known: tuple[ParetoPoint, ...], limits: Limits
) -> Iterator[ParetoPoint | None]:
    """Points of one part, most memory first: (O3); None and no more once the search was stopped."""
    peak = math.inf
    for share in SHARES:
        lean = _with_share(profile, part, job, share)
        capacity = workload(profile, part.cluster, lean).capacity_bytes
        if peak <= capacity:
            continue
        ceiling = min((one.step_seconds for one in known if one.peak_bytes <= capacity), default=None)
        found, is_proven = _fastest(profile, part, lean, ceiling, limits)
        if not is_proven:
            yield None
            return
        if found is not None:
            point = _point(found, part, job)
            peak = point.peak_bytes
            yield point
        elif ceiling is None:  # nothing fits, let alone with less
            return


def _with_share(profile: ModelProfile, part: Part, job: Job, share: float) -> Job:
    """The job that may use a share of the memory that it might."""
    work = workload(profile, part.cluster, job)
    kept = float(work.device.memory_bytes - int(share * work.capacity_bytes))
    if work.groups:  # a fraction means the same on every kind of device; bytes are held to the smallest
        least = min(group.device.memory_bytes for group in work.groups)
        headroom = job.memory_headroom if job.memory_headroom < 1 else job.memory_headroom / least
        kept = 1 - share * (1 - headroom)
    return job.model_copy(update={"memory_headroom": kept}) if share < 1 else job


def _fastest(
    profile: ModelProfile, part: Part, job: Job, ceiling_seconds: float | None, limits: Limits
) -> tuple[Candidate | None, bool]:
    """The fastest plan below a ceiling, and whether that is proven."""
    work = workload(profile, part.cluster, job)
    ceiling = NO_LIMIT if ceiling_seconds is None else round(ceiling_seconds / TICK_SECONDS)
    state = begin(work, space_of(work), Options(), Callbacks(should_stop=limits.should_stop), ceiling)
    state.deadline = limits.deadline
    while state.is_open and state.seconds_left() > 0:
        advance(state)
    return state.best, not state.is_open


def _point(found: Candidate, part: Part, job: Job) -> ParetoPoint:
    memory = rank_memory(found.costs, found.schedule, choose(found.costs, found.stage_map))
    seconds = found.ticks * TICK_SECONDS
    return ParetoPoint(
        devices=part.devices,
        layout=with_recompute(found),
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
    return all(here <= there for here, there in zip(_figures(one), _figures(other), strict=True))
