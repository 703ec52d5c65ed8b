"""What every layer costs at least, whatever the layout: what bounds are made of.

Tensor-parallel ranks lie as near as they can, no other ranks exchange anything, and nothing is shared out: a rank has
nothing to do that it could be spared. Where all devices are alike, more is known: what ranks exchange that share a
sequence or experts, and what two ranks would that share out parameters.
"""

from __future__ import annotations

import math

from planner.cost.communication import Group, copies_between_nodes
from planner.cost.groups import Groups
from planner.cost.held import Held
from planner.cost.pricing import LayerCost, LayerPricing, known_prices
from planner.cost.workload import Workload, modes_of
from planner.spec.layout import Layout, ZeroStage
from planner.spec.profile import Measurement, RecomputeMode

Split = tuple[int, int, int, int, bool]
"""Micro-batch size, tensor-, context- and expert-parallel degree, sequence parallelism: a key of `Workload.sizes`."""
Layers = tuple[dict[RecomputeMode, LayerCost], ...]
"""By layer and recompute mode."""
_ALONE = Group(1, 1, 1)
_PAIR = Group(2, 1, 2)


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


def exchanging_costs(
    work: Workload, split: Split, zero: ZeroStage, alike: int = 1
) -> Layers:
    """Every layer by its recompute modes with all that its ranks exchange for every micro-batch, at least.

    Args:
        work: of a cluster of one node group.
        split: of every layer.
        zero: stage; where it exchanges for every micro-batch, what two ranks of one node would.
        alike: ranks with the same experts that share out their states, or more; 1: nothing is known of them.
    """
    layers = _costs(work, split, _all_nearest(work, split, zero, alike), zero=zero)
    copies = work.constants.ring_copies
    if zero < 2 or copies <= 1:
        return layers
    share = (copies - 1) / (copies + 1)
    if work.framework.overlaps_gathers:
        share = 1.0  # compute may hide what a larger ring leaves of the exchange
    return _in_larger_rings(layers, share)


def _in_larger_rings(layers: Layers, share: float) -> Layers:
    """With what ZeRO exchanges at least where two ranks are not the fastest ring of a node: with x > 1 copies (L1), a
    ring of n ranks moves its bytes 1 + (x - 1)/n times, so the more ranks, the less."""
    kinds = {id(options): options for options in layers}
    shorter = {
        key: {mode: _shorter(cost, share) for mode, cost in kinds[key].items()}
        for key in kinds
    }
    return tuple(shorter[id(options)] for options in layers)


def _shorter(cost: LayerCost, share: float) -> LayerCost:
    """By that share of what ZeRO exchanges for a micro-batch, which may all be in its forward or in its backward."""
    spared = math.ceil(share * cost.gather_ticks)
    return cost._replace(
        forward_ticks=max(0, cost.forward_ticks - spared),
        backward_ticks=max(0, cost.backward_ticks - spared),
    )


def stand_apart(work: Workload, split: Split) -> bool:
    """Do no two ranks with the same experts stand on one node? All of an expert-parallel group are between them."""
    _, tensor, context, expert, _ = split
    return context == 1 and expert * tensor % work.domain_devices == 0


def _costs(
    work: Workload, split: Split, groups: Groups, chunks: int = 1, zero: ZeroStage = 0
) -> Layers:
    layout = Layout.model_construct(
        tensor_parallel_degree=split[1], sequence_chunks=chunks, zero_stage=zero
    )
    rows, known, computed = work.sizes[split], known_prices(work, groups, chunks), {}
    alike = work.alike(rows)
    for index in set(alike):
        plain, layer = rows[index][modes_of(rows[index])[0]], work.profile.layers[index]
        computed[index] = LayerPricing(work, layout, groups, layer, plain, known).costs(
            rows[index]
        )
    return tuple(map(computed.__getitem__, alike))


def expert_shares(work: Workload, split: Split) -> tuple[tuple[float, float], ...]:
    """Of every layer the part of its parameters that belongs to experts, and that of those that are trained; 0 where
    there are none.

    Args:
        work: of a node group.
        split: of every layer.
    """
    rows, found = work.sizes[split], {}
    alike = work.alike(rows)
    for index in set(alike):
        held = Held.of(
            work.profile.layers[index], rows[index][modes_of(rows[index])[0]]
        )
        of_trained = held.trained_experts / held.trained if held.trained else 0.0
        found[index] = (
            held.experts / held.elements if held.elements else 0.0,
            of_trained,
        )
    return tuple(map(found.__getitem__, alike))


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


def _all_nearest(work: Workload, split: Split, zero: ZeroStage, alike: int) -> Groups:
    """Neighbours; ranks by themselves, which exchange nothing, where others might be faster.

    Tensor- and context-parallel ranks that divide a domain never lie across two: hierarchical collectives of more nodes
    would have fewer hops. Ranks that share experts, as far as they exchange all to all, are on as few nodes as there
    can be. That is fastest only where the network is slow: half of a group on another node is then no faster than all
    of it on one.
    """
    if not _is_nearer_faster(work):
        return Groups(*(_ALONE,) * 8)
    domain, (_, tensor, context, expert, _) = work.domain_devices, split
    inter, intra = work.inter_node or work.intra_node, work.intra_node
    copied = (
        1 + work.constants.ring_copies
    ) * inter.bandwidth_bytes_per_second  # what NCCL copies inside a node (L1)
    shard = _PAIR if zero > 1 and copied <= intra.bandwidth_bytes_per_second else _ALONE
    apart = Group(alike, alike, 1) if stand_apart(work, split) else shard
    return Groups(
        tensor=Group(tensor, 1, tensor) if domain % tensor == 0 else _ALONE,
        context=Group(context, 1, context)
        if domain % (tensor * context) == 0
        else _ALONE,
        expert=_nearest_experts(expert, tensor, domain)
        if _exchange_all_to_all(work.sizes[split]) and _is_network_much_slower(work)
        else _ALONE,
        data=_ALONE,
        expert_data=_ALONE,
        shard=shard,
        expert_shard=apart if zero > 1 and alike > 1 else _ALONE,
        copies=_ALONE,
    )


def _nearest_experts(expert: int, tensor: int, domain: int) -> Group:
    """Return the expert-parallel group on as few domains as there can be, as even as there can be."""
    nodes = -(-expert * tensor // domain)
    return Group(expert, nodes, -(-expert // nodes), fewest=-(-expert // nodes))


def _is_network_much_slower(work: Workload) -> bool:
    """Return whether half of an all-to-all through the network takes no less than all of it inside a domain."""
    intra, inter = work.intra_node, work.inter_node or work.intra_node
    half = _least_copies_between(work) / 2 / inter.bandwidth_bytes_per_second
    is_slower = half >= 1 / intra.bandwidth_bytes_per_second
    return is_slower and inter.latency_seconds >= intra.latency_seconds


def _least_copies_between(work: Workload) -> float:
    """Return the least c of equation (L5): that of two nodes, where a token is sent to a node once."""
    model = work.profile.transformer
    if model is None or model.experts is None:
        return 1.0
    if work.framework.dispatcher not in ("deepep", "hybridep"):
        return 1.0
    return copies_between_nodes(model.experts.experts_per_token, 2)


def _exchange_all_to_all(rows: tuple[dict[RecomputeMode, Measurement], ...]) -> bool:
    """And in no other way, among ranks that share experts."""
    every = {id(options): options for options in rows}.values()
    collectives = [
        one for options in every for row in options.values() for one in row.collectives
    ]
    return all(
        one.operation == "all_to_all" for one in collectives if one.group == "expert"
    )
