"""Which ways to share out ZeRO's states, and orders of the ranks, are worth a look: those of a family that no other
one dominates.

Layouts that differ in z and k alone, the ZeRO stage and the ranks that share out its states, and in the order of ranks:

    (H1)  a rank holds ceil(x / k) of what is shared out, so no less in smaller groups, and as much of all else; so
          where stage z does not fit in groups of k, it fits in no smaller ones                  -> worth_pricing()
          (what a rank spares of parameters that layers share is rounded down: such models are not cut short)
    (H2)  a is dominated by b where every layer and mode takes the same ticks forward and backward, and OGP, the tails
          of all ranks and the transfers between stages are no less under a. For then no stage map ends its actions
          sooner (S2), and a step is the greatest end + tail; and the dealt map, which depends on these ticks alone
          (E1), is the same                                                                          -> dominates()
    (H3)  the tail of a rank is latency + max(first reduction, all reductions - what can be hidden) + updates, by (S3)
          and (S5); what can be hidden depends on forward and backward, and is no less with ZeRO than without. So no
          tail is less where no reduction is, and no update, and the latency that a spares is no more than what any
          layer's update takes longer: every rank has a layer                                        -> dominates()
          where nothing is hidden, reduction and update of a layer count as one

ZeRO 1 is what (H2) is for: there k changes the tails alone, and smaller groups mostly lengthen them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from planner.cost import LayerCost, LayoutCosts, Workload, layout_costs
from planner.search.bounds.layout import Totals, may_fit
from planner.search.layouts.space import Family, Zero
from planner.search.stage_maps.segments import LayerModes, allowed_modes
from planner.spec.cluster import Link
from planner.spec.layout import RankOrder
from planner.spec.profile import RecomputeMode

Priced = tuple[int, tuple[Zero, RankOrder], LayoutCosts, tuple[LayerModes, ...], Totals]
"""Place among the family's ways, what it is, its costs, the choices of every layer, and their totals."""


def worth_opening(
    work: Workload, family: Family, wish: tuple[str, ...]
) -> list[Priced]:
    """Every way to share out the states that may fit with one micro-batch in flight, and that none dominates."""
    kept: list[Priced] = []
    for one in worth_pricing(work, family, wish):
        if not any(
            _stage(each) == _stage(one) and dominates(each[2], one[2]) for each in kept
        ):
            kept.append(one)
    sharded = [one for one in kept if _stage(one) == 1]

    def is_beaten(plain: Priced) -> bool:
        return _stage(plain) == 0 and any(
            dominates(each[2], plain[2], strictly=True) for each in sharded
        )

    return [one for one in kept if not is_beaten(one)]


def _stage(one: Priced) -> int:
    return one[1][0].stage


def worth_pricing(
    work: Workload, family: Family, wish: tuple[str, ...]
) -> Iterator[Priced]:
    """Those that may fit, larger groups first: equation (H1)."""
    overflows = set()
    for place, (zero, rank_order) in enumerate(family.ways):
        if zero.stage in overflows:
            continue
        costs = layout_costs(work, family.layout(zero, family.orders[0], rank_order))
        modes = allowed_modes(costs, wish)
        totals = Totals.of(costs, modes)
        if may_fit(costs, totals, (1,) * family.pipeline):
            yield place, (zero, rank_order), costs, modes, totals
        elif not costs.shared:
            overflows.add(zero.stage)


def dominates(
    better: LayoutCosts, worse: LayoutCosts, *, strictly: bool = False
) -> bool:
    """Is every stage map no slower, and no leaner, under `worse`? Equations (H2) and (H3).

    Args:
        better: of the same family.
        worse: of it too, with the same ZeRO stage, or none.
        strictly: and slower under it.
    """
    if (
        better.columns or better.ranks
    ):  # the costs of the whole are bounds only: every rank has its own
        parts = zip(
            better.columns or better.ranks, worse.columns or worse.ranks, strict=True
        )
        return all(dominates(*pair, strictly=strictly) for pair in parts)
    if better.shared:
        return False
    least: int | None = None
    is_slower, seen = False, set()
    for layer, options in enumerate(worse.layers):
        if id(options) not in seen:  # identical layers share their costs
            seen.add(id(options))
            longer = _longer(options, better.layers[layer], costs=worse)
            if longer is None:
                return False
            least = longer if least is None else min(least, longer)
            is_slower |= longer > 0
    gained = better.reduction_latency_ticks - worse.reduction_latency_ticks
    if least is None or least < gained or (strictly and not is_slower and gained >= 0):
        return False
    is_alike = better.layout.rank_order == worse.layout.rank_order
    return is_alike or all(map(_no_slower, better.links, worse.links))


def _no_slower(better: Link, worse: Link) -> bool:
    """Between two stages."""
    faster = better.bandwidth_bytes_per_second >= worse.bandwidth_bytes_per_second
    return better is worse or (
        faster and better.latency_seconds <= worse.latency_seconds
    )


def _is_leaner(one: LayerCost, other: LayerCost) -> bool:
    """On the device, or, where states are offloaded, in the host's memory or while they are updated."""
    states, temporary = one.host_optimizer_bytes, one.temporary_bytes
    leaner_host = (
        states < other.host_optimizer_bytes or temporary < other.temporary_bytes
    )
    return leaner_host or one.ogp_bytes < other.ogp_bytes


def _longer(
    worse: Mapping[RecomputeMode, LayerCost],
    better: Mapping[RecomputeMode, LayerCost],
    *,
    costs: LayoutCosts,
) -> int | None:
    """Ticks by which a layer lengthens every tail; None where it may not, or is faster or leaner."""
    pairs = [(worse[mode], better[mode]) for mode in worse]
    for a, b in pairs:
        if (a.forward_ticks, a.backward_ticks) != (
            b.forward_ticks,
            b.backward_ticks,
        ) or _is_leaner(a, b):
            return None
    a, b = pairs[0]
    reduction, update = (
        a.reduction_ticks - b.reduction_ticks,
        a.optimizer_ticks - b.optimizer_ticks,
    )
    framework = costs.work.framework
    if not (framework.overlaps_reduction or framework.overlaps_gathers):
        return reduction + update if reduction + update >= 0 else None
    return update if reduction >= 0 and update >= 0 else None
