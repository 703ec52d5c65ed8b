"""Least costs of every layer under any layout, for bounds.

Tensor-parallel ranks are as near as they can be, no other ranks exchange anything, and nothing is sharded.
"""

from __future__ import annotations

from collections.abc import Collection

from planner.cost.communication import Group
from planner.cost.derived import Rows, Size
from planner.cost.groups import Groups
from planner.cost.pricing import LayerCost, LayerPricing, known_prices
from planner.cost.workload import Workload, modes_of
from planner.spec.layout import Layout
from planner.spec.profile import RecomputeMode

Layers = tuple[dict[RecomputeMode, LayerCost], ...]
"""By layer and recompute mode."""
_ALONE = Group(1, 1, 1)


def nearest_costs(
    work: Workload, size: Size, chunks: int = 1, expert_tensor: int | None = None
) -> Layers:
    """Return the costs of every layer by its recompute modes, on one node group.

    Identical layers share one dict.

    Args:
        work: of the node group.
        size: of every layer.
        chunks: of every sequence.
        expert_tensor: tensor degree of the experts; None: that of all layers.
    """
    key = ("nearest", size, chunks, expert_tensor)
    if key not in work.spent:
        groups = Groups(_nearest(work, size[1]), *(_ALONE,) * 7)
        rows = work.rows_at(size, expert_tensor)
        work.spent[key] = _costs(work, size[1], rows, groups, chunks)
    found: Layers = work.spent[key]
    return found


def _costs(
    work: Workload, tensor: int, rows: Rows, groups: Groups, chunks: int
) -> Layers:
    layout = Layout.model_construct(
        tensor_parallel_degree=tensor, sequence_chunks=chunks
    )
    known = known_prices(work, groups, chunks)
    alike = work.alike(rows)
    computed = {}
    for index in set(alike):
        plain = rows[index][modes_of(rows[index])[0]]
        layer = work.profile.layers[index]
        pricing = LayerPricing(work, layout, groups, layer, plain, known)
        computed[index] = pricing.costs(rows[index])
    return tuple(map(computed.__getitem__, alike))


def nearest_ticks(
    work: Workload, size: Size, chunks: int = 1, expert_tensor: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ticks of forward and of backward of one micro-batch, of every layer.

    Each is the least over the recompute modes.

    Args:
        work: of the node group.
        size: of every layer.
        chunks: of every sequence.
        expert_tensor: tensor degree of the experts; None: that of all layers.
    """
    key = ("ticks", size, chunks, expert_tensor)
    if key not in work.spent:
        layers = nearest_costs(work, size, chunks, expert_tensor)
        least = {id(modes): _least(modes.values()) for modes in layers}
        forward, backward = zip(*(least[id(modes)] for modes in layers), strict=True)
        work.spent[key] = (forward, backward)
    found: tuple[tuple[int, ...], tuple[int, ...]] = work.spent[key]
    return found


def _least(costs: Collection[LayerCost]) -> tuple[int, int]:
    """Return the least ticks of forward and backward."""
    forward = min(each.forward_ticks for each in costs)
    backward = min(each.backward_ticks for each in costs)
    return forward, backward


def _nearest(work: Workload, ranks: int) -> Group:
    """Neighbours on as few domains as there can be; one rank where these would not be the fastest group.

    Groups that neither divide a domain nor fill several lie across its ends: their hierarchical collective may have
    fewer hops than the ring inside.
    """
    domain = work.domain_devices
    if _is_nearer_faster(work) and (domain % ranks == 0 or ranks % domain == 0):
        return Group(ranks, -(-ranks // domain), min(ranks, domain))
    return _ALONE


def _is_nearer_faster(work: Workload) -> bool:
    """Is no link between nodes faster than the one inside?"""
    intra, inter = work.intra_node, work.inter_node or work.intra_node
    is_slower = inter.bandwidth_bytes_per_second <= intra.bandwidth_bytes_per_second
    return (
        is_slower
        and inter.latency_seconds >= intra.latency_seconds
        and not (intra.fits or inter.fits)
    )
