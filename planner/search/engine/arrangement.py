"""How ranks are arranged on the node groups of a cluster, and their micro-batches.

Ranks fill the node groups in order, so that the order of ranks decides which group a
cell is in, the tensor- and context-parallel ranks of one stage and replica. Replicas
with equal groups, stage by stage, are a class of identical replicas. A replica gets
micro-batches in proportion to its speed. Every arrangement is one row of the table.

With f and b the least nanoseconds of forward and backward of a kind of layers, w their
sum, W(g) all of w on node group g, and weights q of the pipeline ranks in proportion to
1 / W of their groups, a replica of M micro-batches takes

    (A1) any schedule: M times the sum over kinds of the least q w over ranks, since the
         weighted mean of the ranks' work is not below it
    (A2) gpipe and 1f1b: the sum over kinds of the least over ranks p of
         w + q ((M - u) f + (M - 1) b), u = min(M, P - p), the weighted mean of (W2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from planner.cost import Workload
from planner.cost.mixed import fair_shares, shards_are_near, standings
from planner.cost.nearest import nearest_ticks
from planner.search.engine.space import Split
from planner.search.engine.sums import Floats
from planner.spec.job import Constraint, allows
from planner.spec.layout import Layout, RankOrder

RANK_ORDERS: tuple[RankOrder, ...] = ("tp-cp-dp-pp", "tp-cp-pp-dp")
_ROUNDING = 1 - 1e-9

Groups = tuple[int, ...]
"""Node group of every pipeline rank of a replica."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Node groups and micro-batches of all replicas."""

    rank_order: RankOrder
    micro_batches: int
    """Of the replica that has most."""
    shares: tuple[int, ...] | None
    """Micro-batches of every replica; None: all have the same number."""
    has_identical_replicas: bool
    shard_degrees: tuple[int | None, ...]
    """Ranks that may share one set of states; None: all replicas."""
    least: int
    """Nanoseconds of gpipe and 1f1b that no cut beats: (A2)."""
    least_of_any: int
    """Nanoseconds of any schedule: (A1)."""


@dataclass(frozen=True)
class Speeds:
    """Least nanoseconds of the layers of one split on every node group."""

    forward: Floats
    """[group, kind], of all layers of the kind."""
    backward: Floats

    @classmethod
    def of(cls, work: Workload, split: Split) -> Speeds:
        """Return the speeds of a cluster's node groups."""
        both = np.array(
            [nearest_ticks(group, split.size) for group in work.groups],
            dtype=np.float64,
        )
        groups, _, layers = both.shape
        kinds, counts = np.unique(
            both.reshape(2 * groups, layers), axis=1, return_counts=True
        )
        summed = (kinds * counts).reshape(groups, 2, -1)
        return cls(summed[:, 0], summed[:, 1])

    def of_one(self, groups: Groups) -> int:
        """Return nanoseconds of one micro-batch on the busiest rank: (A1), at least 1."""
        weights, forward, backward = self._on(groups)
        mean = weights * (forward + backward)
        return max(1, int(mean.min(axis=0).sum() * _ROUNDING))

    def of_step(self, groups: Groups, micro_batches: int) -> int:
        """Return nanoseconds of a step under gpipe or 1f1b: (A2)."""
        weights, forward, backward = self._on(groups)
        ranks = len(groups)
        warm_up = np.minimum(micro_batches, ranks - np.arange(ranks))[:, None]
        later = (micro_batches - warm_up) * forward + (micro_batches - 1) * backward
        mean = forward + backward + weights * later
        return int(mean.min(axis=0).sum() * _ROUNDING)

    def _on(self, groups: Groups) -> tuple[Floats, Floats, Floats]:
        """Return the weight of every rank, and its forward and backward of all kinds."""
        forward = self.forward[list(groups)]
        backward = self.backward[list(groups)]
        work = (forward + backward).sum(axis=1, keepdims=True)
        speeds = 1 / np.maximum(1.0, work)
        return speeds / speeds.sum(), forward, backward


class Arrangements:
    """The arrangements of every combination of degrees on one heterogeneous cluster."""

    def __init__(
        self, work: Workload, constraint: Constraint | None, *, has_shares: bool
    ) -> None:
        """Start without any.

        Args:
            work: on several node groups.
            constraint: on the order of ranks.
            has_shares: replicas may have unequal numbers of micro-batches.
        """
        self.work = work
        self.has_shares = has_shares
        self.orders = [order for order in RANK_ORDERS if allows(constraint, order)]
        self._speeds: dict[Split, Speeds] = {}
        self._groups: dict[tuple[object, ...], tuple[Groups, ...] | None] = {}

    def of(self, degrees: tuple[int, int], split: Split) -> Iterator[Arrangement]:
        """Yield every arrangement with micro-batches of a split's size.

        Args:
            degrees: data and pipeline parallel degree.
            split: size and the other degrees.
        """
        data, pipeline = degrees
        batch = self.work.job.global_batch_size
        count, remainder = divmod(batch, split.micro_batch_size)
        if remainder or count < data:
            return
        orders = self.orders
        if data == 1 or pipeline == 1:  # both orders cost the same
            orders = orders[:1]
        for order in orders:
            groups = self._groups_of(degrees, split, order)
            if groups is not None:
                yield from self._on(groups, split, order, count)

    def _groups_of(
        self, degrees: tuple[int, int], split: Split, order: RankOrder
    ) -> tuple[Groups, ...] | None:
        """Return the groups of every replica; None: a cell is in two node groups."""
        data, pipeline = degrees
        key = (data, split.tensor, pipeline, split.context, order)
        if key not in self._groups:
            layout = Layout.model_construct(
                data_parallel_degree=data,
                tensor_parallel_degree=split.tensor,
                pipeline_parallel_degree=pipeline,
                context_parallel_degree=split.context,
                rank_order=order,
            )
            self._groups[key] = standings(self.work, layout)
        return self._groups[key]

    def _on(
        self, replicas: tuple[Groups, ...], split: Split, order: RankOrder, count: int
    ) -> Iterator[Arrangement]:
        """Yield the arrangement of replicas on their groups, if the runtime has it.

        Args:
            replicas: groups of every replica.
            split: of the layers.
            order: of the ranks.
            count: micro-batches of all replicas together.
        """
        speeds = self._speeds_of(split)
        one = {groups: speeds.of_one(groups) for groups in set(replicas)}
        is_equal = count % len(replicas) == 0
        is_identical = len(one) == 1 and is_equal
        if is_identical:
            shares = (count // len(replicas),) * len(replicas)
        elif split.expert > 1:
            return
        else:
            ticks = tuple(one[groups] for groups in replicas)
            shares = _fair_shares(ticks, count, len(replicas[0]) - 1)
        is_uneven = len(set(shares)) > 1
        if min(shares) < 1 or (is_uneven and not self.has_shares):
            return
        if self.work.is_rearranged and _has_twin(replicas, shares, one):
            return
        classes = set(zip(replicas, shares, strict=True))
        yield Arrangement(
            rank_order=order,
            micro_batches=max(shares),
            shares=shares if is_uneven else None,
            has_identical_replicas=is_identical,
            shard_degrees=_shard_degrees(replicas, split.context),
            least=max(speeds.of_step(*each) for each in classes),
            least_of_any=max(one[groups] * number for groups, number in classes),
        )

    def _speeds_of(self, split: Split) -> Speeds:
        if split not in self._speeds:
            self._speeds[split] = Speeds.of(self.work, split)
        return self._speeds[split]


def _has_twin(
    replicas: Sequence[Groups], shares: Sequence[int], one: dict[Groups, int]
) -> bool:
    """Return whether another order of the node groups has an equal arrangement.

    Every replica is in one node group, and its speed alone decides its share.
    """
    if len(one) == 1:
        return False
    by_speed: dict[int, set[int]] = {}
    for groups, share in zip(replicas, shares, strict=True):
        by_speed.setdefault(one[groups], set()).add(share)
    is_apart = all(len(set(groups)) == 1 for groups in replicas)
    return is_apart and all(len(found) == 1 for found in by_speed.values())


def _shard_degrees(replicas: Sequence[Groups], context: int) -> tuple[int | None, ...]:
    """Return the sizes of groups that lie in one node group each; None: all replicas."""
    ranks = len(replicas) * context
    found: list[int | None] = [None]
    for size in range(2, ranks):
        if ranks % size == 0 and shards_are_near(tuple(replicas), context, size):
            found.append(size)
    return tuple(found)


_fair_shares = lru_cache(maxsize=1024)(fair_shares)
