"""How the ranks of given degrees can stand on a cluster, and how many micro-batches each data rank takes.

(D9)  devices that are alike: the default order of ranks, or the one that the job asks for; equal shares, so that
      data x micro-batch size divides the global batch
(D10) a heterogeneous cluster: both orders, as far as every cell stands in one node group; where data ranks stand on
      different node groups, shares by (V7), at least one micro-batch each             -> planner.cost.mixed
(D11) the speed of a data rank, for (V7), is that of its devices together: they share out the layers, so a
      micro-batch takes 1 / sum over its pipeline ranks of 1 / (ticks of all layers on that device)     -> _ticks()
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from planner.cost import Workload
from planner.cost.mixed import fair_shares, layers_seconds, standings
from planner.spec.job import Constraint, allows
from planner.spec.layout import Layout, RankOrder

Degrees = tuple[int, int, int, int, int]
"""Data, tensor, pipeline, context, expert."""
RANK_ORDERS: tuple[RankOrder, ...] = ("tp-cp-dp-pp", "tp-cp-pp-dp")


class Standing(NamedTuple):
    """How the ranks stand on the devices."""

    micro_batches: int
    """Of a data-parallel rank and step; of the one that has most."""
    rank_order: RankOrder = "tp-cp-dp-pp"
    shares: tuple[int, ...] | None = None
    """`Layout.micro_batch_shares`."""
    are_alike: bool = True
    """All data ranks: the same devices, stage by stage, and equal shares."""


def standings_of(work: Workload, degrees: Degrees, size: int, constraint: Constraint | None) -> Iterator[Standing]:
    """Every standing of these degrees that the job permits, with micro-batches of `size` samples."""
    data, _, pipeline, _, _ = degrees
    permitted = [order for order in RANK_ORDERS if allows(constraint, order)]
    if pipeline == 1 or data == 1:  # both orders are the same
        permitted = [order for order in permitted if order == RANK_ORDERS[0] or constraint is not None][:1]
    batch = work.job.global_batch_size
    if not work.groups:
        orders = permitted if constraint is not None else permitted[:1]
        yield from (Standing(batch // (data * size), order) for order in orders if batch % (data * size) == 0)
    elif batch % size == 0:
        for order in permitted:
            yield from _on_groups(work, degrees, size, order)


def _on_groups(work: Workload, degrees: Degrees, size: int, order: RankOrder) -> Iterator[Standing]:
    """Equation (D10): at most one."""
    data, tensor, pipeline, context, expert = degrees
    layout = Layout.model_construct(
        data_parallel_degree=data,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=pipeline,
        context_parallel_degree=context,
        rank_order=order,
    )
    rows, count = standings(work, layout), work.job.global_batch_size // size
    if rows is None:
        return
    if len(set(rows)) == 1:
        if count % data == 0:
            yield Standing(count // data, order)
        return
    if expert > 1 or count < data:
        return
    split = (size, tensor, context, expert)
    ticks = {row: _ticks([layers_seconds(work.groups[group], split) for group in row]) for row in set(rows)}
    shares = _shares(tuple(ticks[row] for row in rows), count)
    if min(shares) > 0:
        yield Standing(max(shares), order, shares, are_alike=False)


def _ticks(seconds: list[float]) -> int:
    """Equation (D11), in nanoseconds, at least one."""
    if 0.0 in seconds:
        return 1
    return max(1, round(1e9 / sum(1 / each for each in seconds)))


_shares = lru_cache(maxsize=1024)(fair_shares)
