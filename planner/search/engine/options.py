"""How a row's optimizer states are sharded and how its ranks lie on the devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from planner.cost import Workload
from planner.search.engine.space import Rows, Space, runtime_constraints
from planner.search.engine.table import Table
from planner.spec.job import WHOLE_PARAMETERS, Constraint, allows
from planner.spec.layout import Layout, RankOrder, RecomputeWord, ZeroStage

RANK_ORDERS: tuple[RankOrder, ...] = ("tp-cp-dp-pp", "tp-cp-pp-dp")
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


class Option(NamedTuple):
    """Choices of a layout that its row leaves open."""

    zero_stage: ZeroStage
    shard_degree: int | None
    """Ranks that share one set of states; None: all replicas."""
    rank_order: RankOrder


class Row(NamedTuple):
    """One row of the table, as Python integers."""

    data: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    micro_batch_size: int
    micro_batches: int
    sequence_parallel: int
    sequence_chunks: int
    schedule: int
    virtual_stages: int
    split: int

    @classmethod
    def of(cls, table: Table, index: int) -> Row:
        """Return one row of a table."""
        return cls(*(int(getattr(table, name)[index]) for name in cls._fields))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Columns that decide prices; rows that agree in them differ in order only."""
        return (*self[:9], self.split)


@dataclass
class Options:
    """The options of rows of one workload."""

    work: Workload
    space: Space

    def __post_init__(self) -> None:
        """Read the constraints once."""
        self.constraints: Mapping[str, Constraint] = runtime_constraints(self.work)
        self._shared: dict[int, bool] = {}

    def of(self, row: Row) -> Iterator[Option]:
        """Yield every option that the job and the runtime permit, simplest first."""
        orders = self._rank_orders(row)
        for (stage, degree, ranks), order in product(self._shardings(row), orders):
            if not allows(self.constraints.get("zero_stage"), stage):
                continue
            if not allows(self.constraints.get("zero_shard_degree"), ranks):
                continue
            option = Option(stage, degree, order)
            layout = self.layout(row, option)
            if self.work.framework.supports.violation(layout, self.work.job) is None:
                yield option

    def extremes(self, row: Row) -> list[Option]:
        """Return options that together have the least prices of all options of a row.

        Per ZeRO stage and order of ranks, those with the most and the fewest ranks that
        share one set of states.
        """
        groups: dict[tuple[object, ...], list[Option]] = {}
        for option in self.of(row):
            key = option._replace(shard_degree=None)
            groups.setdefault(key, []).append(option)
        replicas = row.data * row.context
        found: list[Option] = []
        for options in groups.values():
            options.sort(key=lambda each: each.shard_degree or replicas)
            found += dict.fromkeys((options[0], options[-1]))
        return found

    def layout(
        self, row: Row, option: Option, recompute: RecomputeWord = "none"
    ) -> Layout:
        """Return the layout of a row with an option; all its parts are valid."""
        return Layout.model_construct(
            data_parallel_degree=row.data,
            tensor_parallel_degree=row.tensor,
            pipeline_parallel_degree=row.pipeline,
            context_parallel_degree=row.context,
            expert_parallel_degree=row.expert,
            expert_tensor_parallel_degree=None,
            virtual_stages_per_rank=row.virtual_stages,
            zero_stage=option.zero_stage,
            zero_shard_degree=option.shard_degree,
            sequence_parallel=bool(row.sequence_parallel),
            micro_batch_size=row.micro_batch_size,
            schedule=self.space.schedules[row.schedule],
            sequence_chunks=row.sequence_chunks,
            rank_order=option.rank_order,
            micro_batch_shares=None,
            recompute=recompute,
            activation_offload=False,
            optimizer_offload=False,
        )

    def _rank_orders(self, row: Row) -> tuple[RankOrder, ...]:
        """Return the orders of ranks, without those that cost the same as another."""
        constraint = self.constraints.get("rank_order")
        permitted = tuple(order for order in RANK_ORDERS if allows(constraint, order))
        is_one_domain = self.work.devices <= self.work.domain_devices
        if row.pipeline == 1 or row.data == 1 or is_one_domain:
            return permitted[:1]
        return permitted

    def _shardings(self, row: Row) -> tuple[tuple[ZeroStage, int | None, int], ...]:
        replicas = row.data * row.context
        is_whole = self.work.job.optimizer in WHOLE_PARAMETERS
        splits_shared = row.pipeline > 1 and self._splits_shared(row.split)
        if replicas == 1 or is_whole or splits_shared:
            return ((0, None, 1),)
        most = 1 if row.sequence_chunks > 1 else 3
        return tuple(
            each for each in shardings(replicas, row.expert) if each[0] <= most
        )

    def _splits_shared(self, split: int) -> bool:
        """Return whether a rank has a shard of a parameter that layers share."""
        if split not in self._shared:
            rows = self.work.sizes[self.space.splits[split]]
            self._shared[split] = splits_shared(self.work, rows)
        return self._shared[split]


@lru_cache(maxsize=4096)
def shardings(
    replicas: int, expert: int
) -> tuple[tuple[ZeroStage, int | None, int], ...]:
    """Return ZeRO stages and group sizes, each with its number of ranks.

    Every group has all experts, so that its size is a multiple of the expert degree.
    """
    groups: list[int | None] = [None]
    for size in range(replicas // 2, 1, -1):
        if replicas % size == 0 and size % expert == 0:
            groups.append(size)
    found: list[tuple[ZeroStage, int | None, int]] = [(0, None, 1)]
    for stage in STAGES[1:]:
        found += [(stage, size, size or replicas) for size in groups]
    return tuple(found)


def splits_shared(work: Workload, rows: Rows) -> bool:
    """Return whether some rank has only a shard of a parameter that layers share."""
    for shared in work.profile.shared_parameters:
        for name in shared.layers:
            place = work.order[name]
            row = next(iter(rows[place].values()))
            whole = work.profile.layers[place].parameters
            local = row.local_parameters
            if local is None:
                local = -(-whole // row.tensor_parallel_degree)
            if local < shared.parameters:
                return True
    return False
