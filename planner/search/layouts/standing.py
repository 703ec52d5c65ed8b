"""How the ranks of given degrees can stand on a cluster, and how many micro-batches each data rank takes.

(D9)  devices that are alike: both orders of ranks, unless they all lie in one domain, or there is one stage or one
      data rank, where both cost the same; equal shares where data x micro-batch size divides the global batch, else
      by (V7) for equal speeds, without expert parallelism: the first data ranks have one micro-batch more than the
      others, which have one at least
(D10) a heterogeneous cluster: both orders, as far as every cell stands in one node group; where data ranks stand on
      different node groups, or equal shares do not divide the global batch, shares by (V7), at least one micro-batch
      each; where each stands within one, and its speed tells its share, only in the cluster's own order of node groups
                                                                                       -> planner.cost.mixed
(D11) with f(l, g), b(l, g) the fewest ticks of layer l on node group g, w their sum, W(g) the sum of w
      over all layers: pipeline ranks on node groups g(p) share out the layers. With weights q(p) in proportion to
      1 / W(g(p)), the weighted mean of their times for one micro-batch is at least
          sum over l of the least q(p) w(l, g(p)) over p                                           -> Speeds.ticks()
      whatever the order of the micro-batches, a step takes M times that
(D12) likewise the mean of what (B2) says of every rank, for M micro-batches and u(p) = min(M, P - p), which is true of
      gpipe as well, since there all forwards come before the backwards:
          T >= sum over l of the least over p of w + q(p) ((M - u(p)) f + (M - 1) b)               -> Speeds.least()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from planner.cost import Workload
from planner.cost.mixed import fair_shares, shards_are_near, standings
from planner.cost.nearest import Split, nearest_ticks
from planner.spec.job import Constraint, allows
from planner.spec.layout import Layout, RankOrder

Degrees = tuple[int, int, int, int, int]
"""Data, tensor, pipeline, context, expert."""
_Ticks = NDArray[np.float64]
_ROUNDING = 1e-9
RANK_ORDERS: tuple[RankOrder, ...] = ("tp-cp-dp-pp", "tp-cp-pp-dp")


class Standing(NamedTuple):
    """How the ranks stand on the devices."""

    micro_batches: int
    """Of a data-parallel rank and step; of the one that has most."""
    rank_orders: tuple[RankOrder, ...] = ("tp-cp-dp-pp",)
    """Those to choose from."""
    shares: tuple[int, ...] | None = None
    """`Layout.micro_batch_shares`."""
    are_alike: bool = True
    """All data ranks: the same devices, stage by stage, and equal shares."""
    near_shards: tuple[int | None, ...] = (None,)
    """On a heterogeneous cluster: ranks that may share out ZeRO's states, `Layout.zero_shard_degree`: (D10)."""
    least_ticks: int = 0
    """That no stage map beats, on a heterogeneous cluster or with shares that differ: (D12)."""
    least_of_any: int = 0
    """That none beats under any order of the micro-batches, on a heterogeneous cluster with replicas alike: (D11)."""


@dataclass(frozen=True)
class Speeds:
    """Ticks of all layers on every node group, for micro-batches and shards of one size; layers alike are added up."""

    forward: _Ticks
    """[g, kind of layer]."""
    backward: _Ticks

    @classmethod
    def of(cls, work: Workload, split: Split) -> Self:
        """The speeds of a cluster's node groups."""
        groups = work.groups or (work,)
        both = np.array(
            [nearest_ticks(group, split) for group in groups], dtype=np.float64
        )
        kinds, counts = np.unique(
            both.reshape(-1, both.shape[-1]), axis=1, return_counts=True
        )
        forward, backward = (
            (kinds * counts).reshape(len(groups), 2, -1).transpose(1, 0, 2)
        )
        return cls(forward, backward)

    def ticks(self, row: tuple[int, ...]) -> int:
        """Of one micro-batch on the busiest of pipeline ranks on these node groups, at least: (D11); 1 or more."""
        weights, forward, backward = self._on(row)
        return max(
            1, int((weights * (forward + backward)).min(axis=0).sum() * (1 - _ROUNDING))
        )

    def least(self, row: tuple[int, ...], count: int) -> int:
        """Of a step of so many micro-batches on these pipeline ranks, at least: (D12)."""
        weights, forward, backward = self._on(row)
        ahead = np.minimum(count, len(row) - np.arange(len(row)))[:, None]
        mean = (
            forward
            + backward
            + weights * ((count - ahead) * forward + (count - 1) * backward)
        )
        return int(mean.min(axis=0).sum() * (1 - _ROUNDING))

    def _on(self, row: tuple[int, ...]) -> tuple[_Ticks, _Ticks, _Ticks]:
        """Weights of the pipeline ranks, and ticks of all layers there."""
        here = list(row)
        forward, backward = self.forward[here], self.backward[here]
        speed = 1 / np.maximum(1.0, (forward + backward).sum(axis=1, keepdims=True))
        return speed / speed.sum(), forward, backward


def standings_of(
    work: Workload,
    degrees: Degrees,
    size: int,
    constraint: Constraint | None,
    speeds: Callable[[], Speeds],
) -> Iterator[Standing]:
    """Every standing of these degrees that the job permits, with micro-batches of `size` samples.

    Args:
        work: its cluster and global batch.
        degrees: of parallelism.
        size: samples of a micro-batch.
        constraint: on the order of the ranks.
        speeds: of the node groups; asked for only where equal devices with equal shares are not all there is.
    """
    data, _, pipeline, _, _ = degrees
    permitted = tuple(order for order in RANK_ORDERS if allows(constraint, order))
    is_one_domain = not work.groups and work.devices <= work.domain_devices
    if pipeline == 1 or data == 1 or is_one_domain:  # both orders cost the same
        permitted = permitted[:1]
    batch = work.job.global_batch_size
    if not work.groups and permitted and batch % (data * size) == 0:
        yield Standing(batch // (data * size), permitted)
    elif batch % size == 0 and batch // size >= data:
        for order in permitted:
            if work.groups:
                yield from _on_groups(work, degrees, batch // size, order, speeds())
            else:
                yield from _uneven(degrees, batch // size, order, speeds)


def _uneven(
    degrees: Degrees, count: int, order: RankOrder, speeds: Callable[[], Speeds]
) -> Iterator[Standing]:
    """Equation (D9), for so many micro-batches that the data ranks do not divide."""
    data, _, pipeline, _, expert = degrees
    if expert == 1:
        shares = tuple(count // data + (place < count % data) for place in range(data))
        least = speeds().least((0,) * pipeline, max(shares))
        yield Standing(
            max(shares), (order,), shares, are_alike=False, least_ticks=least
        )


def _on_groups(
    work: Workload, degrees: Degrees, count: int, order: RankOrder, speeds: Speeds
) -> Iterator[Standing]:
    """Equation (D10): at most one, for so many micro-batches of all data ranks together."""
    data, tensor, pipeline, context, expert = degrees
    layout = Layout.model_construct(
        data_parallel_degree=data,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=pipeline,
        context_parallel_degree=context,
        rank_order=order,
    )
    rows = standings(work, layout)
    if rows is None:
        return
    ticks = {row: speeds.ticks(row) for row in set(rows)}
    if len(ticks) == 1 and count % data == 0:
        each = count // data
        least, of_any = speeds.least(rows[0], each), each * speeds.ticks(rows[0])
        near = _near_shards(rows, context)
        yield Standing(
            each, (order,), near_shards=near, least_ticks=least, least_of_any=of_any
        )
    elif expert == 1:
        shares = _shares(tuple(ticks[row] for row in rows), count, pipeline - 1)
        is_twin = work.is_rearranged and _are_apart(rows, shares, ticks)
        if min(shares) > 0 and not is_twin:
            least = max(
                speeds.least(*each) for each in set(zip(rows, shares, strict=True))
            )
            told = shares if len(set(shares)) > 1 else None
            near = _near_shards(rows, context)
            yield Standing(
                max(shares),
                (order,),
                told,
                are_alike=False,
                near_shards=near,
                least_ticks=least,
            )


def _near_shards(
    rows: Sequence[tuple[int, ...]], context: int
) -> tuple[int | None, ...]:
    """All replicas, or groups of neighbours that stand in one node group each: equation (D10)."""
    replicas = len(rows) * context
    sizes = (size for size in range(2, replicas) if replicas % size == 0)
    return (None, *(size for size in sizes if shards_are_near(rows, context, size)))


def _are_apart(
    rows: Sequence[tuple[int, ...]],
    shares: Sequence[int],
    ticks: Mapping[tuple[int, ...], int],
) -> bool:
    """Is every replica within one node group, with a share that its speed alone tells? Then the order of the node
    groups changes nothing: equation (D10)."""
    by_speed: dict[int, set[int]] = {}
    for row, share in zip(rows, shares, strict=True):
        by_speed.setdefault(ticks[row], set()).add(share)
    return all(len(set(row)) == 1 for row in rows) and all(
        len(told) == 1 for told in by_speed.values()
    )


_shares = lru_cache(maxsize=1024)(fair_shares)
