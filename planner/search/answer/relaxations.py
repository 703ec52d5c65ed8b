"""What a limit costs: the same search with one limit relaxed.

    (X1)  more memory per device; twice the hosts' memory, where that is known; the job without one of its constraints;
          the global batch that is nearest and divides by the devices                          -> relaxations()
    (X2)  each is searched below the plan's step per sample alone, with a fixed amount of work; so most of what gains
          nothing is excluded by its bounds                                                    -> _searched()
    (X4)  where the job fixes how layers are divided: the plan's own layout without that             -> freely_divided()
    (X3)  where nothing fits: the memory that the nearest misses lack, of devices and of hosts, no headroom, the job
          without one of its constraints, else without all, more nodes; each until one layout fits -> remedies()

Work is counted in parts of the space taken up, not in seconds, so that the answer is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from planner.cost import TICK_SECONDS, Workload, workload
from planner.errors import SpecError
from planner.search.answer.explain import with_recompute
from planner.search.answer.nearest import least_need, unfit
from planner.search.answer.words import constraint_text
from planner.search.layouts.offloading import is_offloading_known
from planner.search.layouts.orders import SYNTHESIZED, recompute_wish
from planner.search.layouts.space import space_of
from planner.search.result import Callbacks, Candidate, Limits
from planner.search.solve import advance, begin, single
from planner.search.stage_maps.inside import NO_LIMIT
from planner.search.state import State
from planner.spec.cluster import Cluster
from planner.spec.devices import find_device
from planner.spec.job import CONSTRAINABLE, DIVISION, Job
from planner.spec.plan import Miss, Options, Relaxation
from planner.spec.profile import ModelProfile
from planner.spec.words import counted, gibibytes

FULL_WORK = 6000
"""Parts of the space taken up for one relaxed problem."""
BRIEF_WORK = 300
_SHARES = (16, 4, 1)
"""More memory by these parts of what there is, rounded down to a power of two: 4, 16 and 64 GiB more beside 80 GB."""
_LEAST_GAIN = 1e-4
"""Less is not worth a sentence."""
_MOST_TIMES = 8
"""As many nodes, where nothing fits on those there are."""


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
            work.profile, change, limits, int(per_sample * change.job.global_batch_size)
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
    found = [_remedy(work.profile, change, limits) for change in several]
    if len(work.job.constraints) > 1 and not any(found):
        found.append(_remedy(work.profile, _unconstrained(work), limits))
    found.append(_more_nodes(work, limits))
    return tuple(one for one in found if one is not None)


def _remedy(
    profile: ModelProfile, change: _Change, limits: Limits
) -> Relaxation | None:
    """The best plan of the first layout that fits with a change, of those that need least: (X3)."""
    if limits.should_stop():
        return None
    with suppress(SpecError):
        work = workload(profile, change.cluster, change.job)
        wish = recompute_wish(change.job.constraints.get("recompute"))
        near = (one for one in unfit(work, space_of(work)) if not limits.should_stop())
        least = ((one, least_need(one, wish)) for one in near)
        fits = (one for one, need in least if need.needed_bytes <= need.capacity_bytes)
        costs = next(fits, None)
        if costs is not None:
            given = {
                name: costs.layout.constrained(name)
                for name in CONSTRAINABLE
                if name != "recompute"
            }
            fixed = {**change.job.constraints, **given}
            alone = replace(
                change, job=change.job.model_copy(update={"constraints": fixed})
            )
            state = _searched(profile, alone, limits, NO_LIMIT)
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
        layout=with_recompute(state.best),
        step_seconds=state.best.ticks * TICK_SECONDS,
        gain=gain,
        optimal=gain is not None and state.is_proven,
    )


def _searched(
    profile: ModelProfile, change: _Change, limits: Limits, ceiling: int
) -> State | None:
    """The relaxed problem, searched below a ceiling: (X2); None where the documents no longer go together."""
    with suppress(SpecError):
        work = workload(profile, change.cluster, change.job)
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


def _memory_changes(work: Workload) -> Iterator[_Change]:
    """More memory per device, each time more."""
    for share in _SHARES:
        extra = 1 << max(0, (work.capacity_bytes // share).bit_length() - 1)
        yield _with_memory(work, extra)


def _with_memory(work: Workload, extra_bytes: int) -> _Change:
    """Devices, of every kind, with so much more that the job may use: a fraction of headroom takes more besides."""
    raised, groups = extra_bytes, []
    words = f"{gibibytes(extra_bytes)} more per device"
    if 0 < work.job.memory_headroom < 1:
        raised = math.ceil(extra_bytes / (1 - work.job.memory_headroom))
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
    if work.job.memory_headroom:
        job = work.job.model_copy(update={"memory_headroom": 0.0})
        yield _Change("memory_headroom", "no memory headroom", work.cluster, job)


def _more_nodes(work: Workload, limits: Limits) -> Relaxation | None:
    """The fewest more nodes of the first group on which something fits, up to eight times as many: one more, then by
    half of that more each time; then between the last that are too few and the first that are enough."""
    most = (_MOST_TIMES - 1) * work.cluster.node_groups[0].nodes
    too_few, more = 0, 1
    found: Relaxation | None = None
    while (
        more <= most
        and (found := _remedy(work.profile, _grown(work, more), limits)) is None
    ):
        too_few, more = more, max(more + 1, more * 3 // 2)
    while found is not None and more - too_few > 1:
        middle = (too_few + more) // 2
        row = _remedy(work.profile, _grown(work, middle), limits)
        too_few, more, found = (
            (middle, more, found) if row is None else (too_few, middle, row)
        )
    return found


def _grown(work: Workload, more: int) -> _Change:
    """More nodes of the first group."""
    group = work.cluster.node_groups[0]
    nodes = group.model_copy(update={"nodes": group.nodes + more})
    cluster = work.cluster.model_copy(
        update={"node_groups": (nodes, *work.cluster.node_groups[1:])}
    )
    where = f" in node group {group.name}" if work.groups and group.name else ""
    return _Change(
        "devices",
        f"{counted(more * group.devices_per_node, 'device')} more{where}",
        cluster,
        work.job,
    )
