"""All layouts x contiguous partitions x recompute choices of a small request, priced by the validator's own equations.

The oracle of the search: it shares no line with cost model and search, except that schedules write their own actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from planner.schedule import build
from planner.spec.cluster import Cluster
from planner.spec.job import WHOLE_PARAMETERS, Job
from planner.spec.layout import Layout
from planner.spec.plan import RankPlacement
from planner.spec.profile import ModelProfile, RecomputeMode
from planner.validate.actions import parse
from planner.validate.facts import Facts, gather
from planner.validate.prediction import StepCheck
from planner.validate.prices import Prices

StageMap = tuple[tuple[tuple[int, RecomputeMode], ...], ...]
SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Priced:
    """One stage map under one layout."""

    layout: Layout
    stage_map: StageMap
    nanoseconds: int
    peaks: tuple[int, ...]
    """Bytes, per pipeline rank."""

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of layers of every stage."""
        return tuple(map(len, self.stage_map))

    @property
    def peak(self) -> int:
        """Bytes of the fullest device."""
        return max(self.peaks)


def layouts(profile: ModelProfile, cluster: Cluster, job: Job) -> Iterator[Layout]:
    """Every layout that the executor could run, constraints apart."""
    rows = [{(row.micro_batch_size, row.tensor_parallel_degree) for row in one.measurements} for one in profile.layers]
    for size, tensor in sorted(set.intersection(*rows)):
        if tensor > 1 and job.optimizer in WHOLE_PARAMETERS:
            continue
        for data, pipeline in product(range(1, cluster.devices + 1), range(1, len(profile.layers) + 1)):
            if data * tensor * pipeline == cluster.devices and job.global_batch_size % (data * size) == 0:
                for schedule in SCHEDULES:
                    yield Layout(
                        data_parallel_degree=data,
                        tensor_parallel_degree=tensor,
                        pipeline_parallel_degree=pipeline,
                        micro_batch_size=size,
                        schedule=schedule,
                    )


def place(layout: Layout, devices_per_node: int) -> tuple[RankPlacement, ...]:
    """Tensor innermost, then data, then pipeline; ranks fill the nodes in order."""
    grid = product(
        range(layout.pipeline_parallel_degree), range(layout.data_parallel_degree), range(layout.tensor_parallel_degree)
    )
    return tuple(
        RankPlacement(
            rank=rank,
            node=rank // devices_per_node,
            device=rank % devices_per_node,
            pipeline=pipeline,
            data=data,
            tensor=tensor,
        )
        for rank, (pipeline, data, tensor) in enumerate(grid)
    )


def facts(profile: ModelProfile, cluster: Cluster, job: Job, layout: Layout) -> Facts:
    """What the validator's prices stand on, for a layout in the usual placement."""
    placement = place(layout, cluster.node_groups[0].devices_per_node)
    return gather(profile, cluster, job, layout, placement, layout.micro_batches(job.global_batch_size))


def stage_maps(known: Facts) -> Iterator[StageMap]:
    """Every contiguous partition with every mix of the recompute modes that the layers offer."""
    count, stages = len(known.profile.layers), known.layout.pipeline_parallel_degree
    modes = [tuple(known.rows(layer)) for layer in known.profile.layers]
    for cuts in combinations(range(1, count), stages - 1):
        for chosen in product(*modes):
            layers = tuple(enumerate(chosen))
            yield tuple(layers[start:end] for start, end in pairwise((0, *cuts, count)))


def price(known: Facts) -> Iterator[Priced]:
    """Every stage map of one layout, priced."""
    layout, prices = known.layout, Prices(known)
    schedule = build(layout.schedule, ranks=layout.pipeline_parallel_degree, micro_batches=known.micro_batches)
    actions = parse(schedule.to_text())
    for stage_map in stage_maps(known):
        step = StepCheck(prices, stage_map, actions)
        yield Priced(layout, stage_map, step.step_nanoseconds(), tuple(row.peak_bytes for row in step.memory()))


def price_all(profile: ModelProfile, cluster: Cluster, job: Job) -> list[Priced]:
    """Every stage map of every layout, priced."""
    return [one for layout in layouts(profile, cluster, job) for one in price(facts(profile, cluster, job, layout))]
