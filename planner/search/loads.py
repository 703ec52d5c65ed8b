"""What the layers of a layout take of every pipeline rank, for the linear bound of `planner.search.spread`: before
anything but the layers themselves is priced, and after.

    (U4)  a rank does no less than its layers cost with the nearest tensor-parallel ranks and nobody else to exchange
          with; and of R replicas that share out states under ZeRO z it holds 1 / R of those that z names, at least;
          layers that share parameters may lie on one rank, so theirs count nothing            -> portion_bound()
    (U5)  with prices, what several users of a shared parameter spare is room for others          -> priced_bound()

Columns are bounded one by one: a step ends with the slowest, whatever the others' stage maps would be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.cost import LayerCost, LayoutCosts, Workload, reserved_bytes
from planner.cost.mixed import nearest_costs, standings
from planner.search.bounds import room_bytes, warm_ups
from planner.search.lanes import modes_on
from planner.search.segments import LayerModes
from planner.search.space import Family, Zero
from planner.search.spread import Floats, RankLoad, Spread

_PORTIONS = ((0, 1), (2,), (3,))
"""ZeRO stages that are bounded together: of 0 and 1 either may dominate the other."""


def portions(work: Workload, family: Family, limit_ticks: int) -> Iterator[tuple[int, Family]]:
    """Parts of a family on several node groups by their ZeRO stages, each with a bound by (U4); the family as a whole,
    where even the stage that needs least memory is no better than the limit."""
    stages = {zero.stage for zero in family.zeros}
    least = portion_bound(work, family, max(stages), limit_ticks)
    if least >= limit_ticks:
        yield least, family
        return
    before = 0
    for together in _PORTIONS:
        part = replace(family, zeros=tuple(zero for zero in family.zeros if zero.stage in together), ways_before=before)
        if part.zeros:
            stage = max(zero.stage for zero in part.zeros)
            yield (least if stage == max(stages) else portion_bound(work, family, stage, limit_ticks)), part
            before += len(part.ways)


def portion_bound(work: Workload, family: Family, stage: int, limit_ticks: int) -> int:
    """Ticks that no layout of a family with this ZeRO stage beats under gpipe and 1f1b, by (U4); what is no better
    than the limit is not told more exactly."""
    layout = family.layout(Zero(0), family.orders[0])
    rows, shares = standings(work, layout), layout.shares(work.job.global_batch_size)
    assert rows is not None, "cells of a family stand in one node group each"
    loads = {
        place: _nearest_load(work.groups[place], family, stage) for place in {each for row in rows for each in row}
    }
    bound = 0
    for row, share in sorted(set(zip(rows, shares, strict=True))):
        in_flight = [min(share, len(row) - rank) for rank in range(len(row))]
        bound = max(bound, Spread.of([loads[place] for place in row], share, in_flight).bound(limit_ticks))
    return bound


def _nearest_load(work: Workload, family: Family, stage: int) -> RankLoad:
    """Of a device of a node group: equation (U4)."""
    key = ("loads", family.split)
    if key not in work.spent:
        work.spent[key] = _whole_load(work, family)
    load, states = work.spent[key]
    replicas = family.data * family.context
    parts = [replicas if stage >= level else 1 for level in (3, 2, 1)]
    held = sum(each / ranks for each, ranks in zip(states, parts, strict=True))
    return replace(load, ogp_bytes=held)


def _whole_load(work: Workload, family: Family) -> tuple[RankLoad, list[Floats]]:
    """Without states, and bytes of parameters, gradients and optimizer states apart, before they are shared out."""
    layers = nearest_costs(work, family.split)
    sharing = {work.order[name] for shared in work.profile.shared_parameters for name in shared.layers}
    kinds = Counter((id(options), place in sharing) for place, options in enumerate(layers))
    known = {id(options): tuple(options.values()) for options in layers}
    first = [None if shares else known[key][0] for key, shares in kinds]
    counts = np.array(list(kinds.values()), dtype=np.float64)[:, None]
    states = [
        counts * np.array([[getattr(cost, name) if cost else 0.0] for cost in first], dtype=np.float64)
        for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
    ]
    room = work.capacity_bytes - reserved_bytes(work)
    return _load([known[key] for key, _ in kinds], list(kinds.values()), [0.0] * len(kinds), room), states


def priced_bound(costs: LayoutCosts, modes: Sequence[LayerModes], limit_ticks: int) -> int:
    """Ticks that no stage map of a layout of gpipe or 1f1b beats whose ranks differ: equation (U5).

    Args:
        costs: of the layout.
        modes: allowed recompute choices of every layer.
        limit_ticks: what is no better is not told more exactly.
    """
    bound = 0
    for column in costs.columns:
        loads = {id(own.layers): _priced_load(own, modes) for own in column.ranks}
        ranks = [loads[id(own.layers)] for own in column.ranks]
        bound = max(bound, Spread.of(ranks, column.micro_batches, warm_ups(column)).bound(limit_ticks))
    return bound


def _priced_load(own: LayoutCosts, modes: Sequence[LayerModes]) -> RankLoad:
    """Of a rank's device."""
    choices = modes_on(own, modes)
    kinds = [choices[first] for first, _ in own.kinds]
    spared = sum((len(shared.layers) - 1) * shared.ogp_bytes for shared in own.shared)
    ogp = [options[0].ogp_bytes for options in kinds]
    return _load(kinds, [count for _, count in own.kinds], ogp, room_bytes(own) + spared)


def _load(kinds: Sequence[LayerModes], counts: Sequence[int], ogp: Sequence[float], room: int) -> RankLoad:
    """Of kinds of layers, so many of each."""
    most = max(map(len, kinds))
    padded = [(*options, *(options[-1:] * (most - len(options)))) for options in kinds]
    each = np.array(counts, dtype=np.float64)[:, None]

    def table(value: Callable[[LayerCost], float]) -> Floats:
        return each * np.array([[value(cost) for cost in options] for options in padded], dtype=np.float64)

    return RankLoad(
        forward=table(lambda cost: cost.forward_ticks),
        backward=table(lambda cost: cost.backward_ticks),
        ogp_bytes=each * np.array(ogp, dtype=np.float64)[:, None],
        activation_bytes=table(lambda cost: cost.activation_bytes),
        room_bytes=room,
    )
