"""What a limit costs: the same search with one limit relaxed.

    (X1)  more memory per device; twice the hosts' memory, where that is known; the job without one of its constraints;
          the global batch that is nearest and divides by the devices                          -> relaxations()
    (X2)  each is searched below the plan's step per sample alone, with a fixed amount of work; so most of what gains
          nothing is excluded by its bounds                                                    -> _searched()
    (X4)  where the job fixes how layers are divided: the plan's own layout without that             -> freely_divided()
    (X3)  where nothing fits: the memory that the nearest misses lack, of devices and of hosts, no headroom, the job
          without one of its constraints, else without all; each until one layout fits              -> remedies()
    (X5)  where nothing fits: more devices, the smallest cluster first, each searched by itself      -> _Growth.smallest()
          every number of nodes below 16, then multiples of 2, 4, 8 ... and, below the first of these that has a plan,
          those that were left out. What is smaller than the states of the model is left out

Work is counted in parts of the space taken up, not in seconds, so that the answer is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from planner.cost import TICK_SECONDS, Workload, reserved_bytes, workload
from planner.errors import SpecError
from planner.search.answer.nearest import least_need, unfit
from planner.search.engine.offloading import is_offloading_known
from planner.search.layouts.orders import SYNTHESIZED, recompute_wish
from planner.search.layouts.space import space_of
from planner.search.queries.phrases import constraint_text
from planner.search.result import Callbacks, Candidate, Limits
from planner.search.solve import advance, begin, single
from planner.search.stage_maps.inside import NO_LIMIT
from planner.search.state import State
from planner.spec.cluster import Cluster
from planner.spec.devices import catalogue, find_device
from planner.spec.job import CONSTRAINABLE, DIVISION, Job
from planner.spec.plan import Miss, Options, Relaxation
from planner.spec.recipes import STATES
from planner.spec.words import counted, gibibytes

FULL_WORK = 6000
"""Parts of the space taken up for one relaxed problem."""
BRIEF_WORK = 300
_SHARES = (16, 4, 1)
"""More memory by these parts of what there is, rounded down to a power of two: 4, 16 and 64 GiB more beside 80 GB."""
_LEAST_GAIN = 1e-4
"""Less is not worth a sentence."""
SIZE_WORK = 6000
"""Parts of the space taken up on one larger cluster."""
_MOST_TIMES = 8
"""As many nodes at most, where nothing fits on those there are."""
_SIZES_PER_DOUBLING = 8
"""Sizes of a cluster that are tried between one number of nodes and twice as many."""
_MOST_SIZES = 16
"""Sizes that are tried before more devices are given up."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One limit, relaxed."""

    constraint: str
    words: str
    cluster: Cluster
    job: Job


@dataclass(slots=True)
class _Counted:
    """Stops a search after so many questions whether to stop."""

    limits: Limits
    asked: int = field(default=0)

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked > self.limits.work or self.limits.should_stop()


def relaxations(best: Candidate, limits: Limits) -> tuple[Relaxation, ...]:
    """What relaxing gains, each limit by itself: (X1); only what gains."""
    work = best.costs.work
    per_sample = best.ticks / work.job.global_batch_size
    found: list[Relaxation] = []
    by_memory = 0.0
    for change in (
        *_memory_changes(work),
        *_host_memory_changes(work),
        *_without_constraints(work),
        *_batches(work),
    ):
        if limits.should_stop():
            break
        state = _searched(
            work, change, limits, int(per_sample * change.job.global_batch_size)
        )
        if state is not None and state.best is not None:
            gain = 1 - state.best.ticks / change.job.global_batch_size / per_sample
            is_memory = change.constraint == "memory"
            if (
                gain > (by_memory if is_memory else 0.0) + _LEAST_GAIN
            ):  # still more memory may gain no more
                by_memory = gain if is_memory else by_memory
                found.append(_row(change, state, gain))
    return tuple(found)


def freely_divided(best: Candidate, limits: Limits) -> float | None:
    """Part of the step that the plan's own layout would save at least if the job did not fix its division: (X4).

    Returns:
        None: the job does not fix it, or no faster one was found with a fixed amount of work; of a synthesized order
        none is looked for.
    """
    costs, work = best.costs, _undivided(best.costs.work)
    if work is costs.work or costs.layout.schedule == SYNTHESIZED:
        return None
    calls = Callbacks(should_stop=_Counted(limits))
    state = State(work, 1, limits.deadline, calls, ceiling=best.ticks)
    state.push(single(work, costs.layout, state.wish))
    while state.is_open and state.seconds_left() > 0:
        advance(state)
    return 1 - state.best.ticks / best.ticks if state.best else None


def _undivided(work: Workload) -> Workload:
    """Without the job's constraint on the division; the same, where it has none."""
    others = {
        name: value for name, value in work.job.constraints.items() if name != DIVISION
    }
    if len(others) == len(work.job.constraints):
        return work
    job = work.job.model_copy(update={"constraints": others})
    return replace(work, job=job, groups=tuple(map(_undivided, work.groups)))


def remedies(
    work: Workload, nearest: tuple[Miss, ...], limits: Limits
) -> tuple[Relaxation, ...]:
    """Changes with which something fits, where nothing does: (X3).

    Args:
        work: for which nothing fits.
        nearest: what would fit with more memory; nothing: there is no layout at all, whatever the memory.
        limits: of the work.
    """
    memory = (
        (*_missing_memory(work, nearest), *_headroom(work))
        if nearest
        else tuple(_batches(work))
    )
    several = (*memory, *_without_constraints(work))
    found = [_remedy(work, change, limits) for change in several]
    if len(work.job.constraints) > 1 and not any(found):
        found.append(_remedy(work, _unconstrained(work), limits))
    if not work.groups:
        limits = replace(limits, work=SIZE_WORK)
    found.append(_Growth(work, limits).smallest())
    return tuple(one for one in found if one is not None)


def _remedy(given: Workload, change: _Change, limits: Limits) -> Relaxation | None:
    """The best plan of the first layout that fits with a change, of those that need least: (X3)."""
    if limits.should_stop():
        return None
    with suppress(SpecError):
        work = _changed(given, change)
        wish = recompute_wish(change.job.constraints.get("recompute"))
        near = (one for one in unfit(work, space_of(work)) if not limits.should_stop())
        least = ((one, least_need(one, wish)) for one in near)
        fits = (one for one, need in least if need.needed_bytes <= need.capacity_bytes)
        costs = next(fits, None)
        if costs is not None:
            fields = {
                name: costs.layout.constrained(name)
                for name in CONSTRAINABLE
                if name != "recompute"
            }
            fixed = {**change.job.constraints, **fields}
            alone = replace(
                change, job=change.job.model_copy(update={"constraints": fixed})
            )
            state = _searched(given, alone, limits, NO_LIMIT)
            return (
                _row(change, state, None)
                if state is not None and state.best is not None
                else None
            )
    return None


def _row(change: _Change, state: State, gain: float | None) -> Relaxation:
    assert state.best is not None
    return Relaxation(
        constraint=change.constraint,
        change=change.words,
        layout=state.best.layout,
        step_seconds=state.best.ticks * TICK_SECONDS,
        gain=gain,
        optimal=gain is not None and state.is_proven,
    )


def _searched(
    given: Workload, change: _Change, limits: Limits, ceiling: int
) -> State | None:
    """The relaxed problem, searched below a ceiling: (X2); None where the documents no longer go together."""
    with suppress(SpecError):
        work = _changed(given, change)
        state = begin(
            work,
            space_of(work),
            Options(),
            Callbacks(should_stop=_Counted(limits)),
            ceiling,
        )
        state.deadline = limits.deadline
        while state.is_open and state.seconds_left() > 0:
            advance(state)
        return state
    return None


def _changed(given: Workload, change: _Change) -> Workload:
    return workload(
        given.profile, change.cluster, change.job, calibration=given.calibration
    )


def _memory_changes(work: Workload) -> Iterator[_Change]:
    """More memory per device, each time more."""
    for share in _SHARES:
        extra = 1 << max(0, (work.capacity_bytes // share).bit_length() - 1)
        yield _with_memory(work, extra)


def _with_memory(work: Workload, extra_bytes: int) -> _Change:
    """Devices, of every kind, with so much more that the job may use: a fraction of headroom takes more besides."""
    raised, groups = extra_bytes, []
    words = f"{gibibytes(extra_bytes)} more per device"
    if 0 < work.headroom < 1:
        raised = math.ceil(extra_bytes / (1 - work.headroom))
        words += ", headroom apart"
    for group in work.cluster.node_groups:
        device = find_device(group.device)
        larger = device.model_copy(
            update={"memory_bytes": device.memory_bytes + raised}
        )
        groups.append(group.model_copy(update={"device": larger}))
    return _Change(
        "memory",
        words,
        work.cluster.model_copy(update={"node_groups": tuple(groups)}),
        work.job,
    )


def _with_host_memory(work: Workload, extra_bytes: int) -> _Change:
    """Nodes of the only node group with so much more memory."""
    (group,) = work.cluster.node_groups
    larger = group.model_copy(
        update={"host_memory_bytes": (group.host_memory_bytes or 0) + extra_bytes}
    )
    words = f"{gibibytes(extra_bytes)} more of the host's memory per node"
    return _Change(
        "host_memory",
        words,
        work.cluster.model_copy(update={"node_groups": (larger,)}),
        work.job,
    )


def _host_memory_changes(work: Workload) -> Iterator[_Change]:
    """Twice the hosts' memory, where something may be offloaded."""
    if is_offloading_known(work):
        yield _with_host_memory(
            work, work.cluster.node_groups[0].host_memory_bytes or 0
        )


def _without_constraints(work: Workload) -> Iterator[_Change]:
    """The job without each of its constraints."""
    for name, constraint in work.job.constraints.items():
        others = {
            key: value for key, value in work.job.constraints.items() if key != name
        }
        words = f"without {name} = {constraint_text(constraint, name)}"
        yield _Change(
            f"constraints.{name}",
            words,
            work.cluster,
            work.job.model_copy(update={"constraints": others}),
        )


def _unconstrained(work: Workload) -> _Change:
    """The job without all of its constraints, where to leave out one is not enough."""
    fields = ", ".join(work.job.constraints)
    return _Change(
        "constraints",
        f"without {fields}",
        work.cluster,
        work.job.model_copy(update={"constraints": {}}),
    )


def _batches(work: Workload) -> Iterator[_Change]:
    """The nearest global batches that every data-parallel degree divides, where the job's is none."""
    batch, devices = work.job.global_batch_size, work.devices
    if batch % devices:
        for other in (batch // devices * devices, -(-batch // devices) * devices):
            if other:
                job = work.job.model_copy(update={"global_batch_size": other})
                yield _Change(
                    "global_batch_size", f"a global batch of {other}", work.cluster, job
                )


def _missing_memory(work: Workload, nearest: tuple[Miss, ...]) -> Iterator[_Change]:
    """What the nearest miss lacks of the devices' memory, and what the nearest lacks of the hosts'."""
    of_devices, of_hosts = (
        [miss for miss in nearest if miss.memory == whose]
        for whose in ("device", "host")
    )
    for miss in of_devices[:1]:
        yield _with_memory(work, miss.missing_bytes)
    for miss in of_hosts[:1]:
        yield _with_host_memory(work, miss.missing_bytes * work.devices_per_node)


def _headroom(work: Workload) -> Iterator[_Change]:
    if work.headroom:
        job = work.job.model_copy(update={"memory_headroom": 0.0})
        yield _Change("memory_headroom", "no memory headroom", work.cluster, job)


@dataclass(frozen=True, slots=True, order=True)
class _Size:
    """Size of the first node group."""

    devices: int
    nodes: int

    @property
    def devices_per_node(self) -> int:
        """Devices of each node."""
        return self.devices // self.nodes


@dataclass
class _Growth:
    """Tries larger first node groups, the smallest first: equation (X5)."""

    work: Workload
    limits: Limits
    closed: set[_Size] = field(default_factory=set)
    """Sizes on which no plan fits, proven."""

    def smallest(self) -> Relaxation | None:
        """Return the best plan on the smallest size on which one is found.

        None: none of the sizes has a plan, or the time is over.
        """
        sizes = _larger_sizes(self.work)
        for place, size in enumerate(_few_of(sizes)):
            found = self._plan_on(size, sizes)
            if found is not None:
                return self._smaller(size, sizes) or found
            if place == _MOST_SIZES:
                break
        return None

    def _smaller(self, size: _Size, sizes: Sequence[_Size]) -> Relaxation | None:
        """Return the best plan on the smallest of the sizes that were left out before this one."""
        tried = [each for each in _few_of(sizes) if each < size]
        below = tried[-1] if tried else None
        left_out = [
            each for each in sizes if each < size and (below is None or each > below)
        ]
        for each in left_out[:: max(1, len(left_out) // _SIZES_PER_DOUBLING)]:
            found = self._plan_on(each, sizes)
            if found is not None:
                return found
        return None

    def _plan_on(self, size: _Size, sizes: Sequence[_Size]) -> Relaxation | None:
        if self.limits.should_stop():
            return None
        change = _grown(self.work, size)
        state = _searched(self.work, change, self.limits, NO_LIMIT)
        if state is None or state.best is None:
            if state is not None and not state.is_open and not state.unproven:
                self.closed.add(size)
            return None
        are_fewest = all(each in self.closed for each in sizes if each < size)
        fewest = "the fewest" if are_fewest else "the fewest of those tried"
        row = _row(change, state, None)
        told = {
            "change": f"{change.words}, {fewest}",
            "devices": change.cluster.devices,
            "optimal": state.is_proven,
        }
        return row.model_copy(update=told)


def _larger_sizes(work: Workload) -> list[_Size]:
    """Return sizes of the first node group above its own, in ascending order.

    These are the divisors of a full node, for a part of one node, and whole nodes, up to
    `_MOST_TIMES` as many; without those whose memory is too small for the model's states.
    """
    group = work.cluster.node_groups[0]
    full = _full_node_devices(work)
    least = _least_devices(work)
    parts = [
        _Size(devices, 1)
        for devices in range(group.devices_per_node + 1, full)
        if full % devices == 0
    ]
    own = group.nodes if full == group.devices_per_node else 0
    first = max(own + 1, -(-least // full))
    most = _MOST_TIMES * max(first, group.nodes)
    nodes = [_Size(count * full, count) for count in range(first, most + 1)]
    return [size for size in parts if size.devices >= least] + nodes


def _few_of(sizes: Sequence[_Size]) -> list[_Size]:
    """Return about `_SIZES_PER_DOUBLING` sizes for every doubling of nodes, multiples of powers of two."""
    few = []
    for size in sizes:
        step = max(1, (1 << (size.nodes.bit_length() - 1)) // _SIZES_PER_DOUBLING)
        if size.nodes % step == 0:
            few.append(size)
    return few


def _full_node_devices(work: Workload) -> int:
    """Return the devices of a full node: the catalogue's number if the only node has fewer."""
    group = work.cluster.node_groups[0]
    entry = catalogue().get(group.device) if isinstance(group.device, str) else None
    if entry is None or group.nodes > 1 or work.groups:
        return group.devices_per_node
    return max(group.devices_per_node, entry.devices_per_node)


def _least_devices(work: Workload) -> int:
    """Return the devices without which parameters, gradients and optimizer states do not fit, however sharded.

    1: nothing is known, because other node groups or the hosts may hold some of them.
    """
    if work.groups or is_offloading_known(work):
        return 1
    recipe = work.recipe
    each = recipe.parameter_bytes + recipe.gradient_bytes + recipe.master_bytes
    each += recipe.state_bytes * STATES.get(recipe.optimizer, 0)
    again = {
        name for shared in work.profile.shared_parameters for name in shared.layers[1:]
    }
    parameters = sum(
        layer.parameters - layer.frozen_parameters
        for layer in work.profile.layers
        if layer.name not in again
    )
    free = work.capacity_bytes - reserved_bytes(work)
    return -(-parameters * each // max(1, free))


def _grown(work: Workload, size: _Size) -> _Change:
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
    groups = (group.model_copy(update=fields), *work.cluster.node_groups[1:])
    cluster = work.cluster.model_copy(update={"node_groups": groups})
    words = f"{counted(cluster.devices, 'device')} instead of {work.cluster.devices}"
    if work.groups and group.name:
        words += f" (more in node group {group.name})"
    return _Change("devices", words, cluster, work.job)
