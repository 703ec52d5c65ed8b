"""All layouts x contiguous partitions x recompute choices of a small request, priced by the check's own equations.

The oracle of the search: it shares no line with cost model and search, except that schedules write their own actions,
and that the rules by which layers are dealt to several stages per rank and recompute there, and micro-batches to data
ranks where they do not divide, are theirs (they have tests of their own).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice, pairwise, product
from typing import Any

from planner.check.actions import parse_actions
from planner.check.context import Context
from planner.check.price import Prices, Pricing
from planner.check.step import Step
from planner.cost.mixed import fair_shares
from planner.errors import LayoutError
from planner.schedule import Schedule, build
from planner.search.engine.balance import balanced_cut
from planner.spec.cluster import Cluster
from planner.spec.devices import domain_of
from planner.spec.job import WHOLE_PARAMETERS, Job
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement
from planner.spec.profile import Measurement, ModelProfile, RecomputeMode
from planner.spec.recompute import MODES
from tests.brute_force_division import given_sizes, has_division, obeys
from tests.brute_force_recompute import ruled_map

StageMap = tuple[tuple[tuple[int, RecomputeMode], ...], ...]
Split = tuple[int, int, int, int, bool]
"""Micro-batch size, tensor, context and expert degree, sequence parallelism."""
Zero = tuple[Any, int | None]
"""ZeRO stage, and the ranks that share out its states where these are not all."""
PARTITIONED = ("gpipe", "1f1b")
"""Schedules whose stage map is free; the others take the one of the rule (E1), (E2)."""
DEALT = (
    "eager-1f1b",
    "interleaved-1f1b",
    "interleaved-memory-optimised",
    "looped-bfs",
    "zb-h1",
    "zb-h1-fused",
    "zb-h2",
    "zb-v",
    "hanayo",
)
CHUNKED = ("seqpipe", "seqvpp", "seqsmartvpp")
"""Of sequences in several chunks."""
SPLIT = ("zb-h1", "zb-h1-fused", "zb-h2", "zb-v")
"""Of them, those with I and W: the executor does not recompute under them."""
MOST_VIRTUAL_STAGES, MOST_MIXED_STAGES = 8, 4
LEAN = ("hanayo", "interleaved-memory-optimised")
"""On one rank; where layers recompute one by one."""
_MODES = MODES


@dataclass(frozen=True)
class Priced:
    """One stage map under one layout."""

    layout: Layout
    stage_map: StageMap
    nanoseconds: int
    peaks: tuple[int, ...]
    """Bytes, per pipeline rank."""
    hosts: tuple[int, ...]
    """Likewise, in its node's memory."""

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of layers of every stage."""
        return tuple(map(len, self.stage_map))

    @property
    def peak(self) -> int:
        """Bytes of the fullest device."""
        return max(self.peaks)


def layouts(profile: ModelProfile, cluster: Cluster, job: Job) -> Iterator[Layout]:
    """Every layout of the space, constraints apart."""
    rows = [{split_of(row) for row in one.measurements} for one in profile.layers]
    whole = job.optimizer in WHOLE_PARAMETERS
    for split in sorted(set.intersection(*rows)):
        size, tensor, context, expert, sequence = split
        pieces = context * (tensor if sequence else 1)
        if (whole and tensor * expert > 1) or job.sequence_length % pieces:
            continue
        for data, pipeline in product(
            range(1, cluster.devices + 1), range(1, len(profile.layers) + 1)
        ):
            if (
                data * tensor * pipeline * context != cluster.devices
                or data * context % expert
            ):
                continue
            alone = (
                whole
                or data * context == 1
                or (pipeline > 1 and shares_shards(profile, split))
            )
            zeros: list[Zero] = (
                [(0, None)] if alone else list(zero_choices(data * context, expert))
            )
            ranks = (
                rank_orders(cluster) if data > 1 and pipeline > 1 else ("tp-cp-dp-pp",)
            )
            if job.global_batch_size % (data * size):
                few = [
                    (zero, shards)
                    for zero, shards in zeros
                    if zero < 2 and shards is None
                ]
                ways = list(
                    product(few, uneven_orders(profile, job, split, data, pipeline))
                )
            else:
                ways = list(even_ways(profile, job, split, zeros, data, pipeline))
            offloads = offload_choices(profile, cluster, split)
            for ((zero, shards), order), rank_order, offload in product(
                ways, ranks, offloads
            ):
                if not may_offload(offload, zero, order):
                    continue
                yield Layout(
                    data_parallel_degree=data,
                    tensor_parallel_degree=tensor,
                    pipeline_parallel_degree=pipeline,
                    context_parallel_degree=context,
                    expert_parallel_degree=expert,
                    sequence_parallel=sequence,
                    micro_batch_size=size,
                    zero_stage=zero,
                    zero_shard_degree=shards,
                    rank_order=rank_order,
                    **order,
                    **offload,
                )


def offload_choices(
    profile: ModelProfile, cluster: Cluster, split: Split
) -> list[dict[str, bool]]:
    """What may go to hosts of known memory and bandwidth: nothing, activations of layers that can do without
    recomputation, optimizer states, both."""
    (group,) = cluster.node_groups
    assert not isinstance(group.device, str)
    if (
        group.host_memory_bytes is None
        or group.device.host_bandwidth_bytes_per_second is None
    ):
        return [{}]
    plain = all(
        any(
            split_of(row) == split and row.recompute == "none"
            for row in one.measurements
        )
        for one in profile.layers
    )
    return [
        {"activation_offload": activations, "optimizer_offload": states}
        for activations, states in product((False, True), repeat=2)
        if plain or not activations
    ]


def may_offload(offload: dict[str, bool], zero: int, order: dict[str, Any]) -> bool:
    """Does this go with a ZeRO stage and an order of the micro-batches?"""
    if "micro_batch_shares" in order:
        return not any(offload.values())
    if not offload.get("activation_offload"):
        return True
    is_whole = (
        order.get("sequence_chunks", 1) == 1
        and order.get("recompute", "none") == "none"
    )
    return is_whole and zero < 3 and order["schedule"] not in SPLIT


def even_ways(
    profile: ModelProfile,
    job: Job,
    split: Split,
    zeros: list[Zero],
    data: int,
    pipeline: int,
) -> Iterator[tuple[Zero, dict[str, Any]]]:
    """ZeRO and order of the micro-batches, of which every data rank has as many."""
    micro_batches = job.global_batch_size // (data * split[0])
    yield from product(zeros, ({"schedule": name} for name in PARTITIONED))
    yield from product(zeros, orders(profile, pipeline, micro_batches, DEALT, 1))
    rows = ({split_of(row) for row in one.measurements} for one in profile.layers)
    for chunks in chunk_counts(profile, job, split, set.intersection(*rows)):
        cut = orders(profile, pipeline, micro_batches, CHUNKED, chunks)
        yield from product((each for each in zeros if each[0] < 2), cut)


def uneven_orders(
    profile: ModelProfile, job: Job, split: Split, data: int, pipeline: int
) -> Iterator[dict[str, Any]]:
    """Where data ranks do not divide the micro-batches: shares by the rule for equal speeds, all layers alike."""
    size, expert = split[0], split[3]
    if (
        job.global_batch_size % size
        or job.global_batch_size < size * data
        or expert > 1
    ):
        return
    shares = fair_shares((1,) * data, job.global_batch_size // size, pipeline - 1)
    for name, mode in product(PARTITIONED, modes_offered(profile)):
        yield {"schedule": name, "micro_batch_shares": shares, "recompute": mode}


def modes_offered(profile: ModelProfile) -> list[RecomputeMode]:
    """Recompute modes that some layer offers."""
    offered = {row.recompute for layer in profile.layers for row in layer.measurements}
    return [mode for mode in _MODES if mode in offered]


def has_choices(profile: ModelProfile) -> bool:
    """Does some layer offer several recompute modes?"""
    return any(
        len({row.recompute for row in layer.measurements}) > 1
        for layer in profile.layers
    )


def is_ruled(layout: Layout) -> bool:
    """Do its layers recompute by the rule (E7), which asks how large the devices are?"""
    return layout.recompute == "per-layer" and layout.schedule not in PARTITIONED


def rank_orders(cluster: Cluster) -> tuple[Any, ...]:
    """Both, unless all devices reach each other by the same links."""
    several = cluster.devices > domain_of(cluster.node_groups[0])
    return ("tp-cp-dp-pp", "tp-cp-pp-dp") if several else ("tp-cp-dp-pp",)


def zero_choices(replicas: int, expert: int) -> Iterator[Zero]:
    """ZeRO stages, and groups that share out the states: of one size, each with all experts."""
    yield 0, None
    groups = [
        size
        for size in range(2, replicas)
        if replicas % size == 0 and size % expert == 0
    ]
    yield from product((1, 2, 3), (None, *groups))


def split_of(row: Measurement) -> Split:
    """What splits the layer that a row tells of."""
    degrees = (
        row.tensor_parallel_degree,
        row.context_parallel_degree,
        row.expert_parallel_degree,
    )
    return (row.micro_batch_size, *degrees, row.sequence_parallel)


def shares_shards(profile: ModelProfile, split: Split) -> bool:
    """Does some user of a shared parameter hold fewer elements than it has, not counting vocabularies, which all split by
    rows?"""
    first = profile.layers[0].name
    for shared in profile.shared_parameters:
        if profile.tokens_per_sample and first in shared.layers:
            continue
        for user in (one for one in profile.layers if one.name in shared.layers):
            row = next(each for each in user.measurements if split_of(each) == split)
            held = (
                -(-user.parameters // split[1])
                if row.local_parameters is None
                else row.local_parameters
            )
            if held < shared.parameters:
                return True
    return False


def chunk_counts(
    profile: ModelProfile, job: Job, split: Split, known: set[Split]
) -> list[int]:
    """Sequence chunks, where the profile shows that sequences can be cut, and what every kernel takes of them."""
    rows = [
        row
        for one in profile.layers
        for row in one.measurements
        if split_of(row) == split
    ]
    kinds = {operation.kind for row in rows for operation in row.operations}
    told = "attention" in kinds and all(
        row.operations for row in rows if row.forward_flops
    )
    if not told or not any(context > 1 for _, _, context, _, _ in known):
        return []
    ranks = split[2] * (split[1] if split[4] else 1)
    return [
        chunks for chunks in (2, 4, 8) if job.sequence_length % (chunks * ranks) == 0
    ]


def orders(
    profile: ModelProfile,
    pipeline: int,
    micro_batches: int,
    names: tuple[str, ...],
    chunks: int,
) -> Iterator[dict[str, Any]]:
    """Schedule, stages per rank and recomputation that so many ranks, micro-batches and chunks take."""
    offered = modes_offered(profile)
    for name, virtual in product(names, range(1, MOST_VIRTUAL_STAGES + 1)):
        if pipeline == 1 or pipeline * virtual > len(profile.layers):
            continue
        try:
            build(
                name,
                ranks=pipeline,
                micro_batches=micro_batches,
                virtual_stages=virtual,
                sequence_chunks=chunks,
            )
        except LayoutError:
            continue
        for mode in _MODES:
            if mode == "none" or (mode in offered and name not in SPLIT):
                order = {
                    "schedule": name,
                    "virtual_stages_per_rank": virtual,
                    "recompute": mode,
                }
                yield order | {"sequence_chunks": chunks}
        if (
            name not in (*SPLIT, *LEAN)
            and virtual <= MOST_MIXED_STAGES
            and has_choices(profile)
        ):
            order = {
                "schedule": name,
                "virtual_stages_per_rank": virtual,
                "recompute": "per-layer",
            }
            yield order | {"sequence_chunks": chunks}


def place(layout: Layout, devices_per_node: int) -> tuple[RankPlacement, ...]:
    """Tensor innermost, then context, data, pipeline, or pipeline before data; experts over neighbours; ranks fill the
    nodes in order."""
    outer = (layout.pipeline_parallel_degree, layout.data_parallel_degree)
    stands_whole = layout.rank_order == "tp-cp-pp-dp"
    grid = product(
        *(range(degree) for degree in (reversed(outer) if stands_whole else outer)),
        range(layout.context_parallel_degree),
        range(layout.tensor_parallel_degree),
    )
    return tuple(
        RankPlacement(
            rank=rank,
            node=rank // devices_per_node,
            device=rank % devices_per_node,
            pipeline=pipeline,
            data=data,
            tensor=tensor,
            context=context,
            expert=(data * layout.context_parallel_degree + context)
            % layout.expert_parallel_degree,
        )
        for rank, (first, second, context, tensor) in enumerate(grid)
        for pipeline, data in [(second, first) if stands_whole else (first, second)]
    )


def facts(profile: ModelProfile, cluster: Cluster, job: Job, layout: Layout) -> Context:
    """What the check's prices stand on, for a layout in the usual placement."""
    placement = place(layout, cluster.node_groups[0].devices_per_node)
    return Context(
        profile,
        cluster,
        job,
        layout,
        placement,
        layout.micro_batches(job.global_batch_size),
    )


def stage_maps(
    known: Context, stages: int | None = None, *, are_alike: bool = True
) -> Iterator[StageMap]:
    """Every contiguous partition into so many stages, else into one per pipeline rank; with every mix of the recompute modes that the layers offer where replicas are alike
    and activations stay on the device, else with the layout's, and what recomputes least in layers that do not offer
    it."""
    count, wish = len(known.profile.layers), known.layout.recompute
    stages = stages or known.layout.pipeline_parallel_degree
    modes = [tuple(known.rows(layer)) for layer in known.profile.layers]
    uniform = [wish if wish in offered else offered[0] for offered in modes]
    for cuts in combinations(range(1, count), stages - 1):
        if not obeys(
            known, [end - start for start, end in pairwise((0, *cuts, count))]
        ):
            continue
        for chosen in (
            product(*modes)
            if are_alike and not known.layout.activation_offload
            else [uniform]
        ):
            layers = tuple(enumerate(chosen))
            yield tuple(layers[start:end] for start, end in pairwise((0, *cuts, count)))


def dealt_map(prices: Prices, schedule: Schedule) -> StageMap:
    """The stage map of the rule, for the check's prices."""
    chosen, work = chosen_work(prices)
    sizes = given_sizes(prices.context, schedule.stages) or balanced_cut(
        work, schedule.stage_ranks
    )
    layers = iter(enumerate(chosen))
    return tuple(tuple(islice(layers, size)) for size in sizes)


def chosen_work(prices: Prices) -> tuple[list[RecomputeMode], tuple[int, ...]]:
    """Of every layer how it recomputes where all do as the layout says, and its nanoseconds for a micro-batch."""
    wish = prices.context.layout.recompute
    chosen = [
        wish if wish in options else next(iter(options)) for options in prices.layers
    ]
    priced = [
        options[mode] for options, mode in zip(prices.layers, chosen, strict=True)
    ]
    return chosen, tuple(
        one.whole_forward + one.whole_backward_input + one.backward_weight
        for one in priced
    )


def price(known: Context) -> Iterator[Priced]:
    """Every stage map of one layout, priced."""
    layout, cells = known.layout, Pricing(known)
    prices = cells.prices(cells.sites.columns[0], 0)
    schedule = build(
        layout.schedule,
        ranks=layout.pipeline_parallel_degree,
        micro_batches=known.micro_batches,
        virtual_stages=layout.virtual_stages_per_rank,
        sequence_chunks=layout.sequence_chunks,
    )
    actions = parse_actions(schedule.to_text())
    is_free = layout.schedule in PARTITIONED
    if not is_free and not has_division(known, schedule.stages):
        return
    if is_ruled(layout):
        ruled = ruled_map(cells, schedule)
        stage_maps_here: Iterable[StageMap] = () if ruled is None else (ruled,)
    elif is_free:
        stage_maps_here = stage_maps(known, are_alike=not layout.has_uneven_shares)
    else:
        stage_maps_here = (dealt_map(prices, schedule),)
    for stage_map in stage_maps_here:
        step = Step(cells, stage_map, actions)
        rows = step.memory()
        peaks, hosts = zip(
            *((row.peak_bytes, row.host_bytes) for row in rows), strict=True
        )
        yield Priced(layout, stage_map, step.last.step_nanoseconds, peaks, hosts)


def price_all(
    profile: ModelProfile, cluster: Cluster, job: Job, *, ruled: bool | None = None
) -> list[Priced]:
    """Every stage map of every layout, priced; only of those that do not depend on the size of the devices
    (`is_ruled`), or only of those that do."""
    return [
        one
        for layout in layouts(profile, cluster, job)
        if ruled in (None, is_ruled(layout))
        for one in price(facts(profile, cluster, job, layout))
    ]
