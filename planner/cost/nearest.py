"""Least costs of every layer under any layout, for bounds.

Tensor-parallel ranks are as near as they can be, no other ranks exchange anything, and nothing is sharded.
"""

from __future__ import annotations

from planner.cost.communication import Group
from planner.cost.groups import Groups
from planner.cost.pricing import LayerCost, LayerPricing, known_prices
from planner.cost.workload import Workload, modes_of
from planner.spec.layout import Layout
from planner.spec.profile import RecomputeMode

Split = tuple[int, int, int, int, bool]
"""Micro-batch size, tensor-, context- and expert-parallel degree, sequence parallelism: a key of `Workload.sizes`."""
Layers = tuple[dict[RecomputeMode, LayerCost], ...]
"""By layer and recompute mode."""
_ALONE = Group(1, 1, 1)


def nearest_costs(work: Workload, split: Split, chunks: int = 1) -> Layers:
    """Every layer by its recompute modes, on the devices of one node group; identical layers share one dict.

    Args:
        work: of the node group.
        split: of every layer.
        chunks: of every sequence.
    """
    key = ("nearest", split, chunks)
    if key not in work.spent:
        work.spent[key] = _costs(
            work, split, Groups(_nearest(work, split[1]), *(_ALONE,) * 7), chunks
        )
    found: Layers = work.spent[key]
    return found


def _costs(work: Workload, split: Split, groups: Groups, chunks: int = 1) -> Layers:
    layout = Layout.model_construct(
        tensor_parallel_degree=split[1], sequence_chunks=chunks
    )
    rows, known, computed = work.sizes[split], known_prices(work, groups, chunks), {}
    alike = work.alike(rows)
    for index in set(alike):
        plain, layer = rows[index][modes_of(rows[index])[0]], work.profile.layers[index]
        computed[index] = LayerPricing(work, layout, groups, layer, plain, known).costs(
            rows[index]
        )
    return tuple(map(computed.__getitem__, alike))


def nearest_ticks(
    work: Workload, split: Split
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Forward and backward of one micro-batch through every layer, each in the mode in which it takes least.

    Args:
        work: of the node group.
        split: of every layer.
    """
    key = ("ticks", split)
    if key not in work.spent:
        layers = nearest_costs(work, split)
        least = {
            id(options): (
                min(each.forward_ticks for each in options.values()),
                min(each.backward_ticks for each in options.values()),
            )
            for options in layers
        }
        work.spent[key] = tuple(
            tuple(least[id(each)][place] for each in layers) for place in (0, 1)
        )
    found: tuple[tuple[int, ...], tuple[int, ...]] = work.spent[key]
    return found


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
