"""All layouts x contiguous partitions x recompute choices of a small request on several node groups, priced by the
check's own equations.

As in `tests.brute_force`, no line is shared with cost model and search, except the rules that are not choices: the
actions of a schedule, how layers are dealt, and the shares of replicas that differ, with the speeds that they go by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, permutations, product
from typing import Any

from planner.check.actions import parse_actions
from planner.check.context import Context
from planner.check.price import Pricing
from planner.check.step import ColumnStep
from planner.cost import workload
from planner.cost.mixed import fair_shares
from planner.schedule import Schedule, build
from planner.search.engine.arrangement import Speeds
from planner.search.engine.balance import balanced_cut_among
from planner.search.engine.space import Split as SearchedSplit
from planner.spec.cluster import Cluster
from planner.spec.job import WHOLE_PARAMETERS, Job
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement
from planner.spec.profile import ModelProfile
from tests import brute_force
from tests.brute_force import (
    DEALT,
    PARTITIONED,
    Split,
    StageMap,
    chosen_work,
    modes_offered,
    orders,
    shares_shards,
    split_of,
)
from tests.brute_force_division import given_sizes, has_division
from tests.check.mixed import devices_of, placed

_ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp")


@dataclass(frozen=True)
class Priced:
    """One stage map under one layout, on some node groups."""

    layout: Layout
    order: tuple[int, ...]
    """Node groups that it uses, in the order of their ranks."""
    nanoseconds: int
    peaks: dict[int, int]
    """Bytes of the fullest device of every node group that it uses."""
    hosts: dict[int, int] = field(default_factory=dict)
    """Bytes that it keeps in the hosts' memory, for the device that keeps most."""

    def fits(self, memory: dict[int, int], hosts: dict[int, int] | None = None) -> bool:
        """Do devices of this size hold it, and, where they are told, their parts of the hosts' memory?"""
        on_devices = all(peak <= memory[place] for place, peak in self.peaks.items())
        return on_devices and all(
            self.hosts[place] <= size for place, size in (hosts or {}).items()
        )


def price_all(profile: ModelProfile, cluster: Cluster, job: Job) -> Iterator[Priced]:
    """Every stage map of every layout on every choice of whole node groups, priced."""
    places = range(len(cluster.node_groups))
    for order in (each for count in places for each in permutations(places, count + 1)):
        part = Cluster(node_groups=tuple(cluster.node_groups[place] for place in order))
        if len(order) == 1:
            for one in brute_force.price_all(profile, part, job):
                yield Priced(one.layout, order, one.nanoseconds, {order[0]: one.peak})
            continue
        for layout, rows in layouts(profile, part, job):
            yield from _price(_facts(profile, part, job, layout), rows, order)


def price_layout(
    profile: ModelProfile, cluster: Cluster, job: Job, layout: Layout
) -> Iterator[Priced]:
    """Every stage map of one layout on all of the node groups, priced.

    All layers recompute as the layout says, where it offloads activations or its
    schedule takes the stage map of a rule in `price_all`.
    """
    rows = replicas(layout, cluster)
    assert rows is not None, (
        "a tensor- and context-parallel group stands in one node group"
    )
    yield from _price(
        _facts(profile, cluster, job, layout),
        rows,
        tuple(range(len(cluster.node_groups))),
        has_every_cut=True,
    )


Rows = tuple[tuple[int, ...], ...]
"""By data rank: the node group of every pipeline rank."""


def layouts(
    profile: ModelProfile, cluster: Cluster, job: Job
) -> Iterator[tuple[Layout, Rows]]:
    """Every layout on all of these node groups, constraints apart, and where its replicas stand."""
    for split in sorted(
        set.intersection(
            *({split_of(row) for row in one.measurements} for one in profile.layers)
        )
    ):
        size, tensor, context, expert, sequence = split
        whole = job.optimizer in WHOLE_PARAMETERS
        if (whole and tensor * expert > 1) or job.sequence_length % (
            context * (tensor if sequence else 1)
        ):
            continue
        for data, pipeline in product(
            range(1, cluster.devices + 1), range(1, len(profile.layers) + 1)
        ):
            if (
                data * tensor * pipeline * context != cluster.devices
                or job.global_batch_size % size
            ):
                continue
            degrees = {
                "data_parallel_degree": data,
                "tensor_parallel_degree": tensor,
                "pipeline_parallel_degree": pipeline,
                "context_parallel_degree": context,
                "sequence_parallel": sequence,
                "micro_batch_size": size,
            }
            alone = (
                whole
                or data * context == 1
                or (pipeline > 1 and shares_shards(profile, split))
            )
            for rank_order in _ORDERS if data > 1 and pipeline > 1 else _ORDERS[:1]:
                simple = Layout(**degrees, rank_order=rank_order)
                rows = replicas(simple, cluster)
                if rows is not None and data * context % expert == 0:
                    for more in _choices(
                        profile, cluster, job, split, rows, is_alone=alone
                    ):
                        yield Layout.model_validate(simple.model_dump() | more), rows


def replicas(layout: Layout, cluster: Cluster) -> Rows | None:
    """Where they stand; None: the ranks of one tensor- and context-parallel group stand in two node groups."""
    homes = {(one.pipeline, one.data): set[int]() for one in _place(layout, cluster)}
    nodes = [
        place
        for place, group in enumerate(cluster.node_groups)
        for _ in range(group.nodes)
    ]
    for one in _place(layout, cluster):
        homes[one.pipeline, one.data].add(nodes[one.node])
    if any(len(home) > 1 for home in homes.values()):
        return None
    stages = range(layout.pipeline_parallel_degree)
    return tuple(
        tuple(next(iter(homes[stage, data])) for stage in stages)
        for data in range(layout.data_parallel_degree)
    )


def _choices(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    split: Split,
    rows: Rows,
    *,
    is_alone: bool,
) -> Iterator[dict[str, Any]]:
    """Shares, ZeRO, schedules and the word for recomputation."""
    data, count = len(rows), job.global_batch_size // split[0]
    zeros = (0,) if is_alone else (0, 1, 2, 3)
    if len(set(rows)) == 1 and count % data == 0:
        ruled = (
            one
            for one in orders(profile, len(rows[0]), count // data, DEALT, 1)
            if one["recompute"] != "per-layer"
        )
        ways = [*({"schedule": name} for name in PARTITIONED), *ruled]
        for (zero, shards), order in product(_sharings(zeros, rows, split), ways):
            yield {
                "expert_parallel_degree": split[3],
                "zero_stage": zero,
                "zero_shard_degree": shards,
                **order,
            }
        return
    speeds = Speeds.of(workload(profile, cluster, job), SearchedSplit(*split))
    shares = fair_shares([speeds.of_one(row) for row in rows], count, len(rows[0]) - 1)
    if split[3] > 1 or min(shares) == 0:
        return
    sharings = _sharings(zeros[:2], rows, split)
    for (zero, shards_), schedule, mode in product(
        sharings, PARTITIONED, modes_offered(profile)
    ):
        order = {"schedule": schedule, "recompute": mode}
        yield {
            "micro_batch_shares": shares,
            "zero_stage": zero,
            "zero_shard_degree": shards_,
            **order,
        }


def _dealt_map(cells: Pricing, schedule: Schedule) -> StageMap:
    """The stage map of the rule, for the check's prices on every pipeline rank of the only column."""
    (column,) = cells.sites.columns
    ranks = range(len(column.groups))
    maps = [chosen_work(cells.prices(column, rank)) for rank in ranks]
    given = given_sizes(cells.context, schedule.stages)
    sizes = given or balanced_cut_among(
        tuple(work for _, work in maps), tuple(ranks), schedule.stage_ranks
    )
    layers = iter(enumerate(maps[0][0]))
    return tuple(tuple(islice(layers, size)) for size in sizes)


def _sharings(
    zeros: Sequence[int], rows: Rows, split: Split
) -> list[tuple[int, int | None]]:
    """ZeRO stages, shared out by all replicas, or by neighbours that stand in one node group."""
    context, expert = split[2], split[3]
    replicas = [row for row in rows for _ in range(context)]
    count = len(replicas)
    sizes = [
        size for size in range(2, count) if count % size == 0 and size % expert == 0
    ]
    near = [
        size
        for size in sizes
        if all(len(set(replicas[at : at + size])) == 1 for at in range(0, count, size))
    ]
    return [(zero, size) for zero in zeros for size in (None, *(near if zero else ()))]


def _place(layout: Layout, cluster: Cluster) -> tuple[RankPlacement, ...]:
    return placed(layout, devices_of(cluster.node_groups))


def _facts(
    profile: ModelProfile, cluster: Cluster, job: Job, layout: Layout
) -> Context:
    count = layout.micro_batches(job.global_batch_size)
    return Context(profile, cluster, job, layout, _place(layout, cluster), count)


def _price(
    known: Context, rows: Rows, order: tuple[int, ...], *, has_every_cut: bool = False
) -> Iterator[Priced]:
    """Every stage map of one layout, priced; the one of the rule, where layers are dealt."""
    layout, cells = known.layout, Pricing(known)
    schedule = build(
        layout.schedule,
        ranks=layout.pipeline_parallel_degree,
        micro_batches=known.micro_batches,
        virtual_stages=layout.virtual_stages_per_rank,
    )
    actions = parse_actions(schedule.to_text())
    are_alike = len(set(rows)) == 1 and not layout.has_uneven_shares
    is_free = layout.schedule in PARTITIONED
    if not is_free and not has_division(known, schedule.stages):
        return
    if is_free:
        maps = brute_force.stage_maps(known, are_alike=are_alike)
    elif has_every_cut:
        maps = brute_force.stage_maps(known, schedule.stages, are_alike=False)
    else:
        maps = iter([_dealt_map(cells, schedule)])
    for stage_map in maps:
        peaks: dict[int, int] = {}
        hosts: dict[int, int] = {}
        steps = []
        for column in cells.sites.columns:
            pipeline = ColumnStep(cells, column, stage_map, actions)
            steps.append(pipeline.step_nanoseconds)
            for place, row in zip(column.groups, pipeline.memory(), strict=True):
                peaks[order[place]] = max(peaks.get(order[place], 0), row.peak_bytes)
                hosts[order[place]] = max(hosts.get(order[place], 0), row.host_bytes)
        yield Priced(layout, order, max(steps), peaks, hosts)
