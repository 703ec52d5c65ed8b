"""The Pareto front: step time against devices and memory per device.

    (O1)  Devices: all, and every number of nodes that divides the cluster's nodes; below
          one node, every number of devices that divides the node's. On several node
          groups these are nodes of the first group, and whole groups in every order.
    (O2)  Memory: all that the job may use of a device, three quarters, a half and a
          quarter of it.
    (O3)  For each, fewest devices first, the fastest plan. It must be faster than the
          plans of fewer devices with no more memory. A plan that needs no more than a
          smaller share is the fastest of that share, too.
    (O4)  A point is left out if another one is no worse in step, devices and memory.

Every point is the best over the cuts that are evaluated; what a limit leaves unproven
is no point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from planner.cost import TICK_SECONDS, Workload, choose, rank_memory, workload
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.engine import Search
from planner.search.engine.result import Candidate
from planner.search.engine.space import divisors
from planner.search.parts import Part, arrangements, parts_of, token_price
from planner.search.result import Limits
from planner.search.support import supported_space
from planner.spec.cluster import Cluster
from planner.spec.job import Job
from planner.spec.plan import ParetoPoint, PlanRequest
from planner.spec.profile import ModelProfile

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the memory that the job may use."""


def pareto_front(
    request: PlanRequest, profile: ModelProfile, limits: Limits
) -> tuple[tuple[ParetoPoint, ...], bool]:
    """Return the front, most devices first, and whether all points were looked for.

    Args:
        request: has the whole cluster, the job and the calibration.
        profile: of the model.
        limits: when to stop.
    """
    points: list[ParetoPoint] = []
    for part in dividing_parts(request.cluster):
        for point in _points(request, profile, part, points, limits):
            if point is None:
                return undominated(points), False
            points.append(point)
    return undominated(points), True


def dividing_parts(cluster: Cluster) -> tuple[Part, ...]:
    """Return the parts of (O1), fewest devices first."""
    group, *others = cluster.node_groups
    nodes = divisors(sum(each.nodes for each in cluster.node_groups))
    devices = divisors(group.devices_per_node)
    first = cluster.model_copy(update={"node_groups": (group,)})
    found = []
    for part in parts_of(first):
        count = len(part.nodes)
        if count in nodes and (count > 1 or part.devices in devices):
            found.append(part)
    if others:
        whole_first = first.devices
        found = [part for part in found if part.devices < whole_first]
        found += arrangements(cluster)
    return tuple(sorted(found, key=lambda part: part.devices))


def _points(
    request: PlanRequest,
    profile: ModelProfile,
    part: Part,
    known: Sequence[ParetoPoint],
    limits: Limits,
) -> Iterator[ParetoPoint | None]:
    """Yield the points of one part, most memory first: (O3); None: a limit ended it."""
    job, calibration = request.job, request.calibration
    whole = workload(profile, part.cluster, job, calibration=calibration)
    fewer = tuple(known)
    peak = math.inf
    for share in SHARES:
        limited = _with_share(whole, job, share)
        work = workload(profile, part.cluster, limited, calibration=calibration)
        if peak <= min(each.capacity_bytes for each in work.groups or (work,)):
            continue
        ceiling = _ceiling(fewer, work.capacity_bytes)
        search = Search(work, supported_space(work), ceiling)
        if not _is_proven(search, limits):
            yield None
            return
        if search.best is not None:
            point = _point(search.best, part, job)
            peak = point.peak_bytes
            yield point
        elif ceiling == IMPOSSIBLE:
            return


def _ceiling(points: Sequence[ParetoPoint], capacity_bytes: int) -> int:
    """Return the shortest step of points that need no more memory, in nanoseconds."""
    steps = [one.step_seconds for one in points if one.peak_bytes <= capacity_bytes]
    return round(min(steps) / TICK_SECONDS) if steps else IMPOSSIBLE


def _with_share(work: Workload, job: Job, share: float) -> Job:
    """Return the job with the headroom that leaves it a share of its memory.

    On several node groups it is an equal fraction of every device.
    """
    if share == 1:
        return job
    if work.groups:
        least = min(group.device.memory_bytes for group in work.groups)
        headroom = work.headroom if work.headroom < 1 else work.headroom / least
        fraction = 1 - share * (1 - headroom)
        return job.model_copy(update={"memory_headroom": fraction})
    left = float(work.device.memory_bytes - int(share * work.capacity_bytes))
    return job.model_copy(update={"memory_headroom": left})


def _is_proven(search: Search, limits: Limits) -> bool:
    """Search to the end; return whether no limit ended it."""
    if limits.should_stop():
        return False
    search.start(limits.should_stop)
    while search.is_open:
        if limits.should_stop():
            return False
        search.advance()
    return True


def _point(found: Candidate, part: Part, job: Job) -> ParetoPoint:
    stages = choose(found.costs, found.stage_map)
    memory = rank_memory(found.costs, found.schedule, stages)
    seconds = found.total * TICK_SECONDS
    return ParetoPoint(
        devices=part.devices,
        layout=found.layout,
        micro_batches=found.costs.micro_batches,
        layers_per_stage=tuple(map(len, found.stage_map)),
        step_seconds=seconds,
        peak_bytes=max(row.peak_bytes for row in memory),
        cost_per_token=token_price(part.cluster, job, seconds),
    )


def undominated(points: Sequence[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Return the points of (O4), most devices first, then fastest."""
    found: list[ParetoPoint] = []
    for point in sorted(points, key=_figures):
        if not any(_is_no_worse(other, point) for other in found):
            found.append(point)
    return tuple(sorted(found, key=lambda one: (-one.devices, one.step_seconds)))


def _figures(point: ParetoPoint) -> tuple[int, float, int]:
    return point.devices, point.step_seconds, point.peak_bytes


def _is_no_worse(one: ParetoPoint, other: ParetoPoint) -> bool:
    pairs = zip(_figures(one), _figures(other), strict=True)
    return all(first <= second for first, second in pairs)
