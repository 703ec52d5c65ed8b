"""What every layer costs at least, whatever the layout: what bounds are made of.

Tensor-parallel ranks lie as near as they can, no other ranks exchange anything, and nothing is shared out: a rank has
nothing to do that it could be spared.
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
_ALONE = Group(1, 1, 1)


def nearest_costs(work: Workload, split: Split, chunks: int = 1) -> tuple[dict[RecomputeMode, LayerCost], ...]:
    """Every layer by its recompute modes, on the devices of one node group; identical layers share one dict.

    Args:
        work: of the node group.
        split: of every layer.
        chunks: of every sequence.
    """
    key = ("nearest", split, chunks)
    if key not in work.spent:
        layout = Layout.model_construct(tensor_parallel_degree=split[1], sequence_chunks=chunks)
        rows, groups = work.sizes[split], Groups(_nearest(work, split[1]), *(_ALONE,) * 7)
        known, alike, computed = known_prices(work, groups, chunks), work.alike(rows), {}
        for index in set(alike):
            plain, parameters = rows[index][modes_of(rows[index])[0]], work.profile.layers[index].parameters
            computed[index] = LayerPricing(work, layout, groups, parameters, plain, known).costs(rows[index])
        work.spent[key] = tuple(map(computed.__getitem__, alike))
    found: tuple[dict[RecomputeMode, LayerCost], ...] = work.spent[key]
    return found


def nearest_ticks(work: Workload, split: Split) -> tuple[tuple[int, ...], tuple[int, ...]]:
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
        work.spent[key] = tuple(tuple(least[id(each)][place] for each in layers) for place in (0, 1))
    found: tuple[tuple[int, ...], tuple[int, ...]] = work.spent[key]
    return found


def _nearest(work: Workload, ranks: int) -> Group:
    """Neighbours on as few nodes as there can be; one rank where these would not be the fastest group."""
    intra, inter = work.intra_node, work.inter_node or work.intra_node
    is_slower = inter.bandwidth_bytes_per_second <= intra.bandwidth_bytes_per_second
    if is_slower and inter.latency_seconds >= intra.latency_seconds and not (intra.fits or inter.fits):
        return Group(ranks, -(-ranks // work.domain_devices), min(ranks, work.domain_devices))
    return _ALONE
