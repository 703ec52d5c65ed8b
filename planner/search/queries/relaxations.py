"""What a limit costs: the same search with one limit or constraint changed.

Changes are more memory per device, twice the memory of hosts, the job without one of its
constraints, and the nearest global batches that the devices divide. Where nothing fits,
they are the memory that is missing, no headroom, and more nodes as well. Each changed
problem has a search of its own, below the step of the plan, by a bounded amount of work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from planner.cost import TICK_SECONDS, Workload, reserved_bytes, workload
from planner.errors import SpecError
from planner.search.engine.bound import IMPOSSIBLE
from planner.search.engine.engine import Search
from planner.search.engine.offloading import is_offloading_known
from planner.search.engine.result import Candidate, Result
from planner.search.engine.stop import AnyStop, GapStop, Stop, WorkStop
from planner.search.queries.misses import needs
from planner.search.queries.outcome import Outcome
from planner.search.queries.phrases import constraint_text
from planner.search.result import Limits
from planner.search.support import supported_space
from planner.spec.cluster import Cluster
from planner.spec.devices import catalogue, find_device
from planner.spec.job import CONSTRAINABLE, DIVISION, Constraint, Job
from planner.spec.plan import Miss, Relaxation
from planner.spec.recipes import STATES
from planner.spec.words import counted, gibibytes

FULL_WORK = 10_000_000
"""Work of one changed problem, in units of `planner.search.engine.stop`."""
BRIEF_WORK = 2_000_000
LARGE_TABLE = 2000
"""Rows above which a changed problem is searched only if a row that needs least memory
fits."""
LEAST_GAIN = 1e-4
"""Smaller gains are not reported."""
MEMORY_SHARES = (16, 4, 1)
"""More memory by 1 / share of what there is, rounded down to a power of two: 4, 16 and
64 GiB more than 80 GB."""
MOST_TIMES = 8
"""Largest factor by which nodes are added."""
SIZES_PER_DOUBLING = 8
"""Sizes of a cluster that are tried between one number of nodes and twice as many."""
MOST_SIZES = 16
"""Sizes of a cluster that are tried at all."""

Constraints = Mapping[str, Constraint]


@dataclass(frozen=True, slots=True)
class Change:
    """A limit or constraint that is changed, and the documents with the change."""

    constraint: str
    """See `planner.spec.plan.Relaxation`."""
    words: str
    cluster: Cluster
    job: Job

    def workload(self, given: Workload) -> Workload:
        """Return the changed problem.

        Raises:
            SpecError: the documents do not belong together any more.
        """
        return workload(
            given.profile, self.cluster, self.job, calibration=given.calibration
        )

    def relaxation(
        self, found: Candidate, *, gain: float | None, is_proven: bool
    ) -> Relaxation:
        """Return the document."""
        return Relaxation(
            constraint=self.constraint,
            change=self.words,
            layout=found.layout,
            step_seconds=found.total * TICK_SECONDS,
            gain=gain,
            optimal=is_proven,
        )


def relaxations(outcome: Outcome, limits: Limits) -> tuple[Relaxation, ...]:
    """Return the changes that make the plan faster, each by itself.

    Args:
        outcome: of a search that found a plan.
        limits: work of every changed problem, and when to stop.
    """
    best, work = outcome.best, outcome.work
    if best is None:
        return ()
    per_sample = best.total / work.job.global_batch_size
    found: list[Relaxation] = []
    gain_of_memory = 0.0
    for change in _changes(work):
        if limits.should_stop():
            break
        batch = change.job.global_batch_size
        result = _search(work, change, limits, int(per_sample * batch))
        if result is None or result.best is None:
            continue
        gain = 1 - result.best.total / batch / per_sample
        is_memory = change.constraint == "memory"
        if gain <= LEAST_GAIN + (gain_of_memory if is_memory else 0.0):
            continue
        if is_memory:
            gain_of_memory = gain
        is_proven = result.lower_bound >= result.best.total
        found.append(change.relaxation(result.best, gain=gain, is_proven=is_proven))
    return tuple(found)


def _changes(work: Workload) -> Iterator[Change]:
    for share in MEMORY_SHARES:
        extra = 1 << max(0, (work.capacity_bytes // share).bit_length() - 1)
        yield _with_memory(work, extra)
    if is_offloading_known(work):
        (group,) = work.cluster.node_groups
        yield _with_host_memory(work, group.host_memory_bytes or 0)
    yield from _without_constraints(work)
    yield from _batches(work)


def _search(
    work: Workload, change: Change, limits: Limits, ceiling: int
) -> Result | None:
    """Search a changed problem; None: its documents do not belong together."""
    with suppress(SpecError):
        changed = change.workload(work)
        search = Search(changed, supported_space(changed), ceiling)
        return search.run(_stop(limits))
    return None


def _stop(limits: Limits) -> Stop:
    """Return the criterion that ends the search of a changed problem."""

    def is_stopped(best: int | None, bound: int, work: int) -> bool:
        return limits.should_stop()

    return AnyStop((GapStop(), WorkStop(limits.work), is_stopped))


def freely_divided(outcome: Outcome, limits: Limits) -> float | None:
    """Return what the plan's layout saves without the job's fixed layers per stage.

    Args:
        outcome: of a search that found a plan.
        limits: work, and when to stop.

    Returns:
        Part of the step that is saved at least; None if the job fixes nothing, or if no
        faster cut was found.
    """
    best, work = outcome.best, outcome.work
    if best is None or DIVISION not in work.job.constraints:
        return None
    constraints = {
        name: best.layout.constrained(name)
        for name in CONSTRAINABLE
        if name != "recompute"
    }
    recompute = work.job.constraints.get("recompute")
    job = _constrained(work.job, constraints | _only("recompute", recompute))
    change = Change(f"constraints.{DIVISION}", "", work.cluster, job)
    result = _search(work, change, limits, best.total)
    if result is None or result.best is None:
        return None
    return 1 - result.best.total / best.total


def _only(name: str, constraint: Constraint | None) -> dict[str, Constraint]:
    return {} if constraint is None else {name: constraint}


def feasible_changes(
    work: Workload, nearest: tuple[Miss, ...], limits: Limits
) -> tuple[Relaxation, ...]:
    """Return changes with which a plan fits, where none does.

    Args:
        work: for which nothing fits.
        nearest: layouts that nearly fit; none: there is no layout, whatever the memory.
        limits: work of every changed problem, and when to stop.
    """
    changes: list[Change] = []
    if nearest:
        changes += _missing_memory(work, nearest)
        changes += _without_headroom(work)
    else:
        changes += _batches(work)
    changes += _without_constraints(work)
    found = [_feasible(work, change, limits) for change in changes]
    if len(work.job.constraints) > 1 and not any(found):
        found.append(_feasible(work, _unconstrained(work), limits))
    found.append(_Growth(work, limits).smallest())
    return tuple(one for one in found if one is not None)


def _feasible(work: Workload, change: Change, limits: Limits) -> Relaxation | None:
    """Return the best plan that was found with a change."""
    if limits.should_stop():
        return None
    with suppress(SpecError):
        return _Changed.of(work, change, limits).relaxation()
    return None


@dataclass
class _Changed:
    """The search of a problem that had no plan without a change."""

    change: Change
    result: Result
    least: Candidate | None
    """A plan that needs least memory; None: none of them fits."""

    @classmethod
    def of(cls, work: Workload, change: Change, limits: Limits) -> _Changed:
        """Search the changed problem.

        Raises:
            SpecError: its documents do not belong together.
        """
        changed = change.workload(work)
        search = Search(changed, supported_space(changed))
        least = _least_memory(search, limits)
        if least is None and len(search.rows) > LARGE_TABLE:
            return cls(change, search.result(), None)
        return cls(change, search.run(_stop(limits)), least)

    def relaxation(self) -> Relaxation | None:
        """Return the best plan that was found; None: there is none."""
        best = self.result.best or self.least
        if best is None:
            return None
        is_proven = self.result.lower_bound >= best.total
        return self.change.relaxation(best, gain=None, is_proven=is_proven)

    @property
    def is_infeasible(self) -> bool:
        """Whether the search proved that nothing fits."""
        return self.result.best is None and self.result.lower_bound >= IMPOSSIBLE


def _least_memory(search: Search, limits: Limits) -> Candidate | None:
    """Return the plan of a layout that needs least memory, if it fits."""
    for need in needs(search, limits):
        if need.missing_bytes <= 0:
            return need.candidate()
    return None


def _with_memory(work: Workload, extra_bytes: int) -> Change:
    """Return the change to devices of which the job may use so many bytes more.

    Devices of all node groups change. A headroom is a fraction of the device, which has
    accordingly more.
    """
    raised = extra_bytes
    words = f"{gibibytes(extra_bytes)} more per device"
    if 0 < work.headroom < 1:
        raised = math.ceil(extra_bytes / (1 - work.headroom))
        words += ", headroom apart"
    groups = []
    for group in work.cluster.node_groups:
        device = find_device(group.device)
        fields = {"memory_bytes": device.memory_bytes + raised}
        larger = device.model_copy(update=fields)
        groups.append(group.model_copy(update={"device": larger}))
    cluster = work.cluster.model_copy(update={"node_groups": tuple(groups)})
    return Change("memory", words, cluster, work.job)


def _with_host_memory(work: Workload, extra_bytes: int) -> Change:
    """Return the change to nodes with so many bytes more of host memory."""
    (group,) = work.cluster.node_groups
    whole = (group.host_memory_bytes or 0) + extra_bytes
    words = f"{gibibytes(extra_bytes)} more of the host's memory per node"
    cluster = _with_group(work, {"host_memory_bytes": whole})
    return Change("host_memory", words, cluster, work.job)


def _with_group(work: Workload, fields: Mapping[str, object]) -> Cluster:
    """Return the cluster with changed fields of its first node group."""
    group, *others = work.cluster.node_groups
    groups = (group.model_copy(update=dict(fields)), *others)
    return work.cluster.model_copy(update={"node_groups": groups})


def _without_constraints(work: Workload) -> Iterator[Change]:
    """Yield the job without each of its constraints."""
    constraints = work.job.constraints
    for name, constraint in constraints.items():
        others = {key: value for key, value in constraints.items() if key != name}
        words = f"without {name} = {constraint_text(constraint, name)}"
        job = _constrained(work.job, others)
        yield Change(f"constraints.{name}", words, work.cluster, job)


def _unconstrained(work: Workload) -> Change:
    """Return the job without any of its constraints."""
    words = f"without {', '.join(work.job.constraints)}"
    return Change("constraints", words, work.cluster, _constrained(work.job, {}))


def _constrained(job: Job, constraints: Constraints) -> Job:
    return job.model_copy(update={"constraints": dict(constraints)})


def _batches(work: Workload) -> Iterator[Change]:
    """Yield the nearest global batches that the devices divide, unless the job's is one."""
    batch, devices = work.job.global_batch_size, work.devices
    if batch % devices == 0:
        return
    below = batch // devices * devices
    for other in (below, below + devices):
        if other:
            job = work.job.model_copy(update={"global_batch_size": other})
            words = f"a global batch of {other}"
            yield Change("global_batch_size", words, work.cluster, job)


def _missing_memory(work: Workload, nearest: tuple[Miss, ...]) -> Iterator[Change]:
    """Yield the memory that the nearest layouts lack, of devices and of hosts."""
    on_device = [miss for miss in nearest if miss.memory == "device"]
    on_host = [miss for miss in nearest if miss.memory == "host"]
    for miss in on_device[:1]:
        yield _with_memory(work, miss.missing_bytes)
    for miss in on_host[:1]:
        yield _with_host_memory(work, miss.missing_bytes * work.devices_per_node)


def _without_headroom(work: Workload) -> Iterator[Change]:
    if work.headroom:
        job = work.job.model_copy(update={"memory_headroom": 0.0})
        yield Change("memory_headroom", "no memory headroom", work.cluster, job)


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """Size of the cluster's first node group."""

    devices: int
    nodes: int

    @property
    def devices_per_node(self) -> int:
        """Devices of each node."""
        return self.devices // self.nodes


@dataclass
class _Growth:
    """Tries larger clusters, the smallest first.

    Every number of nodes below 16, then multiples of 2, 4, 8 and so on; below the first
    of these that has a plan, sizes that were left out are tried as well.
    """

    work: Workload
    limits: Limits
    infeasible: set[Size] = field(default_factory=set)
    """Sizes on which nothing fits, proven."""

    def smallest(self) -> Relaxation | None:
        """Return the best plan on the smallest size on which one is found.

        None: none of the sizes has a plan, or the time is over.
        """
        sizes = larger_sizes(self.work)
        tried: list[Size] = []
        for size in few_of(sizes)[: MOST_SIZES + 1]:
            found = self._plan_on(size, sizes)
            if found is not None:
                above = tried[-1:]
                between = [each for each in sizes if [each] > above and each < size]
                return self._first_of(between, sizes) or found
            tried.append(size)
        return None

    def _first_of(
        self, between: Sequence[Size], sizes: Sequence[Size]
    ) -> Relaxation | None:
        """Return the best plan on the smallest of the sizes that were left out."""
        for size in between[:: max(1, len(between) // SIZES_PER_DOUBLING)]:
            found = self._plan_on(size, sizes)
            if found is not None:
                return found
        return None

    def _plan_on(self, size: Size, sizes: Sequence[Size]) -> Relaxation | None:
        if self.limits.should_stop():
            return None
        with suppress(SpecError):
            change = _grown(self.work, size)
            changed = _Changed.of(self.work, change, self.limits)
            row = changed.relaxation()
            if row is not None:
                devices = {"devices": change.cluster.devices}
                row = row.model_copy(update=devices)
                return self._with_fewest(row, size, sizes)
            if changed.is_infeasible:
                self.infeasible.add(size)
        return None

    def _with_fewest(
        self, row: Relaxation, size: Size, sizes: Sequence[Size]
    ) -> Relaxation:
        """Return the relaxation with the statement whether its devices are the fewest."""
        smaller = [each for each in sizes if each < size]
        are_fewest = all(each in self.infeasible for each in smaller)
        fewest = "the fewest" if are_fewest else "the fewest of those tried"
        return row.model_copy(update={"change": f"{row.change}, {fewest}"})


def larger_sizes(work: Workload) -> list[Size]:
    """Return larger sizes of the first node group, in ascending order.

    These are the divisors of a full node, for a part of one node, and whole nodes, up to
    `MOST_TIMES` as many; without those whose memory is too small for the model's states.
    """
    group = work.cluster.node_groups[0]
    full = _full_node_devices(work)
    least = _least_devices(work)
    parts = [
        Size(devices, 1)
        for devices in range(max(least, group.devices_per_node + 1), full)
        if full % devices == 0
    ]
    own = group.nodes if full == group.devices_per_node else 0
    first = max(own + 1, -(-least // full))
    most = MOST_TIMES * max(first, group.nodes)
    return parts + [Size(count * full, count) for count in range(first, most + 1)]


def few_of(sizes: Sequence[Size]) -> list[Size]:
    """Return about `SIZES_PER_DOUBLING` sizes for every doubling of nodes."""
    few = []
    for size in sizes:
        power = 1 << (size.nodes.bit_length() - 1)
        if size.nodes % max(1, power // SIZES_PER_DOUBLING) == 0:
            few.append(size)
    return few


def _full_node_devices(work: Workload) -> int:
    """Return the devices of a full node: the catalogue's if the only node has fewer."""
    group = work.cluster.node_groups[0]
    entry = catalogue().get(group.device) if isinstance(group.device, str) else None
    if entry is None or group.nodes > 1 or work.groups:
        return group.devices_per_node
    return max(group.devices_per_node, entry.devices_per_node)


def _least_devices(work: Workload) -> int:
    """Return the devices without which parameters, gradients and states do not fit.

    1: nothing is known, because hosts or other node groups may have some of them.
    """
    if work.groups or is_offloading_known(work):
        return 1
    recipe = work.recipe
    each = recipe.parameter_bytes + recipe.gradient_bytes + recipe.master_bytes
    each += recipe.state_bytes * STATES.get(recipe.optimizer, 0)
    again = {
        name for shared in work.profile.shared_parameters for name in shared.layers[1:]
    }
    layers = [layer for layer in work.profile.layers if layer.name not in again]
    parameters = sum(layer.parameters - layer.frozen_parameters for layer in layers)
    free = work.capacity_bytes - reserved_bytes(work)
    return -(-parameters * each // max(1, free))


def _grown(work: Workload, size: Size) -> Change:
    """Return the change to a first node group of another size."""
    group = work.cluster.node_groups[0]
    host = group.host_memory_bytes
    if host is not None:
        host = host * size.devices_per_node // group.devices_per_node
    fields = {
        "nodes": size.nodes,
        "devices_per_node": size.devices_per_node,
        "host_memory_bytes": host,
    }
    cluster = _with_group(work, fields)
    words = f"{counted(cluster.devices, 'device')} instead of {work.devices}"
    if work.groups and group.name:
        words += f" (more in node group {group.name})"
    return Change("devices", words, cluster, work.job)
