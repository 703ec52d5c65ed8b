"""Exact steps of many cuts of a row, by the cost model alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product

from planner.cost import (
    LayoutCosts,
    StageMap,
    Workload,
    choose,
    evaluate,
    rank_memory,
    schedule_of,
)
from planner.search.engine.bound import Order, lower_bound
from planner.search.engine.options import Option, Options, Row
from planner.search.engine.prices import Prices, Pricing
from planner.search.engine.space import Space
from planner.search.engine.table import enumerate_table
from planner.spec.cluster import DeviceSpec
from planner.spec.recompute import MODES
from tests.strategies import Instance


@dataclass
class Layouts:
    """Rows and options of a workload."""

    work: Workload
    space: Space

    def __post_init__(self) -> None:
        """Enumerate the table."""
        self.options = Options(self.work, self.space)
        self.pricing = Pricing(self.work, self.options)
        self.table = enumerate_table(self.work, self.space)

    def row(self, index: int) -> Row:
        """One row."""
        return Row.of(self.table, index)

    def any(
        self, chooser: random.Random, rows: Sequence[Row] = ()
    ) -> tuple[Row, Option]:
        """A random row, of the table or of some rows, with a random option."""
        if rows:
            row = chooser.choice(rows)
        else:
            row = self.row(chooser.randrange(len(self.table)))
        return row, chooser.choice(list(self.options.of(row)))

    def order(self, row: Row) -> Order:
        """The schedule and its numbers."""
        name = self.space.schedules[row.schedule]
        return Order(
            name,
            row.pipeline,
            row.micro_batches,
            row.virtual_stages,
            row.sequence_chunks,
        )

    def prices(self, row: Row, option: Option) -> Prices:
        """The prices of a row's layers."""
        return self.pricing.prices(row, option)

    def bound(self, row: Row, option: Option) -> int:
        """The bound of a row when no step is known."""
        return lower_bound(self.prices(row, option), self.order(row))


def step_of(costs: LayoutCosts, stage_map: StageMap) -> int | None:
    """Nanoseconds of a stage map; None: it does not fit."""
    stages = choose(costs, stage_map)
    schedule = schedule_of(costs)
    if not all(row.fits for row in rank_memory(costs, schedule, stages)):
        return None
    return evaluate(costs, schedule, stages).total_ticks


def all_cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Every division of the layers into stages of at least one layer."""
    for ends in combinations(range(1, layers), stages - 1):
        edges = (0, *ends, layers)
        yield tuple(b - a for a, b in pairwise(edges))


def all_maps(prices: Prices, sizes: Sequence[int]) -> Iterator[StageMap]:
    """Every choice of recompute modes for a cut."""
    modes = [[one.mode for one in prices.modes[kind]] for kind in prices.kind_of]
    for chosen in product(*modes):
        yield stages_of(list(enumerate(chosen)), sizes)


def stages_of(layers: Sequence[tuple[int, str]], sizes: Sequence[int]) -> StageMap:
    """Stages of the given numbers of layers."""
    found = []
    first = 0
    for size in sizes:
        found.append(tuple(layers[first : first + size]))
        first += size
    return tuple(found)  # type: ignore[arg-type]


def random_map(prices: Prices, stages: int, seed: random.Random) -> StageMap:
    """A cut and modes at random, mostly near an even cut with one mode."""
    layers = len(prices.kind_of)
    if seed.random() < 0.2:
        ends = sorted(seed.sample(range(1, layers), stages - 1))
    else:
        ends = [round(layers * (s + 1) / stages) for s in range(stages - 1)]
        for _ in range(seed.randrange(2 * stages + 1)):
            place = seed.randrange(max(1, len(ends)))
            if ends:
                ends[place] += seed.choice((-1, 1))
    edges = [0, *sorted(ends), layers]
    sizes = [b - a for a, b in pairwise(edges)]
    if min(sizes) < 1:
        sizes = [layers // stages + (s < layers % stages) for s in range(stages)]
    modes = []
    wanted = seed.choice((*MODES, "any"))
    for kind in prices.kind_of:
        offered = [one.mode for one in prices.modes[kind]]
        modes.append(wanted if wanted in offered else seed.choice(offered))
    return stages_of(list(enumerate(modes)), sizes)


HOST_BANDWIDTHS = (499979687.0, 4999999937.0, 99999999977.0)
"""Bytes per second of small models' devices to their hosts: the activations of a layer
take about as long as its forward, a tenth of that, or next to nothing."""
PLENTY = 10**9


def with_memory(instance: Instance, memory_bytes: int) -> Instance:
    """The request on devices of this size."""
    group = instance.cluster.node_groups[0]
    assert isinstance(group.device, DeviceSpec)
    device = group.device.model_copy(update={"memory_bytes": memory_bytes})
    group = group.model_copy(update={"device": device})
    cluster = instance.cluster.model_copy(update={"node_groups": (group,)})
    return Instance(instance.profile, cluster, instance.job)


def with_host(instance: Instance, bandwidth: float, host_bytes: int) -> Instance:
    """The request with so much memory of its host for every device."""
    group = instance.cluster.node_groups[0]
    assert isinstance(group.device, DeviceSpec)
    speed = {"host_bandwidth_bytes_per_second": bandwidth}
    device = group.device.model_copy(update=speed)
    memory = host_bytes * group.devices_per_node
    changed = {"device": device, "host_memory_bytes": memory}
    group = group.model_copy(update=changed)
    cluster = instance.cluster.model_copy(update={"node_groups": (group,)})
    return Instance(instance.profile, cluster, instance.job)
