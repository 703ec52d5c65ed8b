"""Best-first search over layouts, to a proven optimum of the cost model.

    (F1)  everything open has a lower bound that no stage map of any of its layouts beats: a family from the work of its
          layers alone, its layouts that share out states alike from their costs, a layout from its schedule, then from
          segments or its dealt stage map                         -> bounds.layout, stage_maps.paths, stage_maps.dealt
    (F2)  always take up what has the least bound: open the family, bound the layout better, or, when that is done,
          solve it                                                                                -> _take_up()
    (F3)  once the least bound is no better than the incumbent, nothing open is: the incumbent is proven -> search()
    (F4)  lower bound of the space = least bound of what is not proven; gap = (step - bound) / step -> State.report()

    (F5)  of the ways to share out ZeRO's states those are left out that another one dominates
                                                                           -> planner.search.layouts.sharding

    (F6)  before all that, a plan at once: the most even cut of a family that fits                   -> dive()

    (F7)  a layout that is dealt as the same one without offloading is no faster, and left out where that one fits:
          copies only lengthen forwards, backwards and tails (S1) to (S4); where layers share parameters, or the
          framework hides reductions behind what copies lengthen, this is not claimed                  -> _dealt()

Ties go to the smaller bound, then to the order of enumeration, so the same request gives the same plan.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial

from planner.cost import (
    LayoutCosts,
    StageMap,
    Workload,
    choose,
    evaluate,
    layout_costs,
    schedule_of,
    stage_memory,
)
from planner.search.bounds.first_gradient import layout_first_gradients
from planner.search.bounds.layout import (
    BOUNDED,
    Totals,
    any_order_bound,
    lower_bound,
    may_fit,
    warm_ups,
)
from planner.search.bounds.least_work import LeastWork, by_layer
from planner.search.bounds.loads import portions, priced_bound
from planner.search.bounds.steady_state import holding, steady_ticks
from planner.search.bounds.whole_layers import family_ticks
from planner.search.layouts.orders import SYNTHESIZED, Order
from planner.search.layouts.sharding import worth_opening
from planner.search.layouts.space import Family, Space, Zero
from planner.search.result import Callbacks, Candidate
from planner.search.stage_maps.dealt import (
    Uniform,
    layout_held,
    layout_schedule,
    layout_traits,
    ranks_of,
    stage_ranks,
    traits_of,
    wholly_held,
)
from planner.search.stage_maps.dealt_on_groups import (
    RankUniform,
    least_on_ranks,
    uniform,
)
from planner.search.stage_maps.dealt_recompute import PerLayer, fewest_modes
from planner.search.stage_maps.inside import (
    NO_LIMIT,
    Inside,
    LayoutSearch,
    Outcome,
    first_plan,
    limits_of,
)
from planner.search.stage_maps.segments import (
    LayerModes,
    allowed_modes,
    choices,
    uniform_modes,
)
from planner.search.stage_maps.synthesized import (
    Unordered,
    first_bound,
    least_ticks,
    synthesized,
)
from planner.search.state import (
    Alike,
    Dealt,
    DealtPerLayer,
    Group,
    Open,
    Searched,
    State,
)
from planner.spec.layout import Layout, RecomputeWord, ZeroStage
from planner.spec.plan import Options

_NOTHING_OFFLOADED = {"activation_offload": False, "optimizer_offload": False}
_DIVES = 8
"""Cuts tried for a first plan."""
_DIVED_INTO = 100
"""Families looked at for it."""
_TWINS = 0.01
"""Bounds of groups of ranks that differ by less are as good as the same to whoever looks for alternatives."""


def search(
    work: Workload, space: Space, options: Options, callbacks: Callbacks
) -> State:
    """Find and prove the best plan of the space: equations (F1) to (F4). Where the search ended."""
    state = begin(work, space, options, callbacks)
    if state.seconds_left() > 0:
        dive(state)
    while state.is_open and state.seconds_left() > 0:
        advance(state)
    state.settle()
    return state


def begin(
    work: Workload,
    space: Space,
    options: Options,
    callbacks: Callbacks,
    ceiling: int = NO_LIMIT,
) -> State:
    """A search that knows the bounds of its families; only plans of fewer ticks than the ceiling matter to it."""
    state = State(
        work,
        space.count,
        time.monotonic() + options.time_limit_seconds,
        callbacks,
        ceiling=ceiling,
    )
    for one in _families(work, space):
        state.push(one)
    return state


def dive(state: State) -> None:
    """A plan at once, wherever one is found: the most even cut of a family that fits, in the order of their bounds."""
    families = [one.item for one in sorted(state.heap) if isinstance(one.item, Family)]
    tries = _DIVES
    for family in families[:_DIVED_INTO]:
        order = [each for each in family.orders if not each.is_dealt][-1:]
        if not order or tries == 0 or state.seconds_left() <= 0:
            continue
        costs = layout_costs(state.work, family.layout(family.leanest[0], order[0]))
        modes = choices(costs, state.wish)
        totals = Totals.of(costs, modes)
        if not may_fit(costs, totals, warm_ups(costs)):
            continue
        tries -= 1
        bound = lower_bound(costs, totals, warm_ups(costs))
        found = first_plan(costs, modes, bound, limit_ticks=state.limit_ticks)
        if found is not None:
            state.take(Candidate(costs, schedule_of(costs), *found))
            state.tell()
            return


def advance(state: State) -> None:
    """Take up what has the least bound."""
    for part in take_up(state, heapq.heappop(state.heap)):
        state.push(part)
    state.tell()


def _families(work: Workload, space: Space) -> Iterator[Open]:
    """Families with what their layers take at least, by (K1) to (K3); on several node groups, or with shares that
    differ, by equation (D12)."""
    known: dict[tuple[object, ...], LeastWork] = {}
    for place, family in enumerate(space.families):
        if work.groups or not family.standing.are_alike:
            yield Open(family.standing.least_ticks, (place,), family)
            continue
        key = (family.split, family.sequence_chunks, family.offloading.activations)
        if key not in known:
            layers = layout_costs(work, family.layout(Zero(0), family.orders[0])).layers
            known[key] = LeastWork.of(by_layer(layers, family.sequence_chunks))
        yield Open(
            known[key].step(family.pipeline, family.micro_batches), (place,), family
        )


def take_up(state: State, one: Open) -> Iterator[Open]:
    """Open a family, bound a layout better, or solve it: equation (F2). What is still open of it."""
    state.bounds.pop(one.order, None)
    match one.item:
        case Family(ways_before=None, is_dealt=False) as family if state.work.groups:
            yield from _portions(state, one, family)
        case Family(ways_before=None) as family if state.work.groups:
            yield from _dealt_family(state, one, family)
        case Family() as family:
            yield from _groups(state, one, family)
        case Group() as group:
            yield from _orders(state, one, group)
        case Alike() as alike:
            yield from _alike(one, alike)
        case Searched() as layout:
            yield from _searched(state, one, layout)
        case Dealt() as layout:
            yield from _dealt(state, one, layout)
        case DealtPerLayer() as layout:
            yield from _dealt_per_layer(state, one, layout)
        case Unordered() as layout:
            yield from _unordered(state, one, layout)


def _portions(state: State, one: Open, family: Family) -> Iterator[Open]:
    """Parts of a family on several node groups, bounded before they are priced."""
    for bound, part in portions(state.work, family, state.limit_ticks):
        place = (
            one.order
            if part.ways_before is None
            else (*one.order, -1 - part.ways_before)
        )
        yield Open(max(one.bound_ticks, bound), place, part)


def _dealt_family(state: State, one: Open, family: Family) -> Iterator[Open]:
    """A family of dealt stage maps on several node groups, bounded before it is priced, if it may fit."""
    least = family_ticks(state.work, family, partial(_least_held, family))
    if least < NO_LIMIT:
        yield Open(
            max(one.bound_ticks, least), one.order, replace(family, ways_before=0)
        )


def _groups(state: State, one: Open, family: Family) -> Iterator[Open]:
    """Every way to share out states that is worth a look: equation (F5)."""
    stages: dict[ZeroStage, list[Open]] = {}
    for way, (zero, rank_order), costs, modes, totals in worth_opening(
        state.work, family, state.wish
    ):
        bound = max(one.bound_ticks, any_order_bound(costs, totals))
        if costs.columns and family.is_dealt:
            bound = max(bound, least_on_ranks(costs, modes))
        place = (one.order[0], way + (family.ways_before or 0))
        found = Open(
            bound, place, Group(family, zero, rank_order, costs, modes, totals)
        )
        stages.setdefault(zero.stage, []).append(found)
        yield found
    for groups in stages.values():
        least = min(groups)
        is_twin = groups[0].bound_ticks <= least.bound_ticks * (1 + _TWINS)
        state.nearest.add((groups[0] if is_twin else least).order)


def _orders(state: State, one: Open, group: Group) -> Iterator[Open]:
    """Every order that may fit; before that, what no order beats, by the micro-batches that all of them hold."""
    if not group.is_tight:
        units = _least_held(group.family, group.family.orders)
        if not may_fit(group.costs, group.totals, units):
            return
        one = replace(
            one,
            bound_ticks=max(
                one.bound_ticks, any_order_bound(group.costs, group.totals, units)
            ),
        )
        if state.heap and state.heap[0].bound_ticks < one.bound_ticks:
            yield replace(one, item=replace(group, is_tight=True))
            return
    alike: dict[RecomputeWord, list[Order]] = {}
    known: dict[RecomputeWord, tuple[tuple[LayerModes, ...], Totals]] = {
        "per-layer": (group.modes, group.totals)
    }
    for place, order in enumerate(group.family.orders):
        if order.is_dealt:
            alike.setdefault(order.recompute, []).append(order)
            continue
        costs = group.costs_of(order)
        units = warm_ups(costs)
        if order.recompute not in known:
            modes = choices(costs, state.wish)
            known[order.recompute] = modes, Totals.of(costs, modes)
        modes, totals = known[order.recompute]
        if may_fit(costs, totals, units):
            bound = max(one.bound_ticks, lower_bound(costs, totals, units))
            if costs.columns and bound < state.limit_ticks:
                bound = max(bound, priced_bound(costs, modes, state.limit_ticks))
            yield Open(bound, (*one.order, place), Searched(costs, modes))
    for place, (mode, orders) in enumerate(
        alike.items(), start=len(group.family.orders)
    ):
        is_free = mode == "per-layer"
        if mode not in known:
            modes = uniform_modes(group.costs, mode)
            known[mode] = modes, Totals.of(group.costs, modes)
        (modes, totals), units = known[mode], _least_held(group.family, tuple(orders))
        if may_fit(group.costs, totals, units):
            bound = max(
                one.bound_ticks,
                any_order_bound(group.costs, totals, units if is_free else None),
            )
            words = [word for word in alike if word != "per-layer"]
            layers = (
                PerLayer.of(group.costs, modes, words)
                if is_free
                else uniform(group.costs, modes)
            )
            if isinstance(layers, RankUniform):
                least = layers.repeated.least_ticks(units)
                if least == NO_LIMIT:
                    continue
                bound = max(bound, least, least_on_ranks(group.costs, modes))
            yield Open(
                bound, (*one.order, place), Alike(group, totals, layers, tuple(orders))
            )


def _least_held(family: Family, orders: tuple[Order, ...]) -> tuple[float, ...]:
    """Micro-batches that every rank holds at least, whichever of these orders is taken."""
    return _least_held_of(
        family.pipeline, family.micro_batches, family.sequence_chunks, orders
    )


@lru_cache(maxsize=4096)
def _least_held_of(
    ranks: int, micro_batches: int, chunks: int, orders: tuple[Order, ...]
) -> tuple[float, ...]:
    least = [float(micro_batches)] * ranks
    for order in orders:
        if order.schedule == SYNTHESIZED:
            return (1.0,) * ranks
        if order.is_dealt:
            held = wholly_held(
                order.schedule, ranks, micro_batches, order.virtual_stages, chunks
            )
        elif order.schedule == "gpipe":
            continue
        else:
            held = tuple(
                float(min(micro_batches, ranks - rank)) for rank in range(ranks)
            )
        least = list(map(min, least, held))
    return tuple(least)


def _alike(one: Open, alike: Alike) -> Iterator[Open]:
    """Every order that may fit, whatever the cut, and as it is dealt."""
    for place, order in enumerate(alike.orders):
        layers, numbers = alike.layers, alike.numbers(order)
        if order.schedule == SYNTHESIZED and isinstance(layers, Uniform):
            unordered = Unordered(alike.group.costs_of(order), layers)
            least = first_bound(unordered)
            if least is not None:
                yield Open(max(one.bound_ticks, least), (*one.order, place), unordered)
            continue
        units = wholly_held(*numbers)
        if not may_fit(alike.group.costs, alike.totals, units):
            continue
        if isinstance(layers, PerLayer):
            bound = max(
                one.bound_ticks, any_order_bound(alike.group.costs, alike.totals, units)
            )
            yield Open(
                bound,
                (*one.order, place),
                DealtPerLayer(alike.group.costs_of(order), layers),
            )
            continue
        if isinstance(layers, RankUniform):
            least = layers.repeated.least_ticks(units)
            if least < NO_LIMIT:
                bound = max(one.bound_ticks, least)
                yield Open(
                    bound,
                    (*one.order, place),
                    Dealt(alike.group.costs_of(order), layers),
                )
            continue
        ranks, traits = stage_ranks(*numbers), traits_of(*numbers)
        sizes = layers.dealt(ranks)
        if layers.may_hold(sizes, traits):
            bound = max(
                one.bound_ticks, layers.bound(sizes, ranks, ends_low=traits.ends_low)
            )
            yield Open(
                bound,
                (*one.order, place),
                Dealt(alike.group.costs_of(order), layers, sizes),
            )


def _searched(state: State, one: Open, layout: Searched) -> Iterator[Open]:
    limit = limits_of(state.limit_ticks, one.bound_ticks)[: layout.trials + 1][-1]
    search = LayoutSearch(layout.costs, layout.modes, limit_ticks=limit)
    search.start()
    if not (search.is_empty or layout.is_tight):
        yield Open(
            max(one.bound_ticks, search.bound),
            one.order,
            replace(layout, is_tight=True, trials=0),
        )
        return
    if not (search.is_empty or layout.is_narrowed):
        search.narrow()
        if search.best:
            state.take(Candidate(layout.costs, schedule_of(layout.costs), *search.best))
        if (
            not search.is_empty
            and state.heap
            and state.heap[0].bound_ticks < search.bound < state.limit_ticks
        ):
            yield Open(
                max(one.bound_ticks, search.bound),
                one.order,
                replace(layout, is_narrowed=True),
            )
            return
    inside = search.finish(state.seconds_left)
    if inside.outcome is Outcome.NOT_BETTER and limit < state.limit_ticks:
        yield Open(limit, one.order, replace(layout, trials=layout.trials + 1))
        return
    if inside.stage_map and inside.step:
        state.take(
            Candidate(
                layout.costs, schedule_of(layout.costs), inside.stage_map, inside.step
            )
        )
    yield from _after(state, one, layout, inside)


def _after(state: State, one: Open, layout: Searched, inside: Inside) -> Iterator[Open]:
    if inside.outcome is Outcome.STOPPED:
        yield Open(max(one.bound_ticks, inside.bound_ticks), one.order, layout)
        return
    state.solved += layout.is_tight
    if inside.outcome is Outcome.NOT_BETTER:
        state.close(one)
    else:
        state.bounds[one.order] = Open(inside.bound_ticks, one.order, layout)


def _dealt(state: State, one: Open, layout: Dealt) -> Iterator[Open]:
    """Deal the layers of a layout, bound it by its steady state, or solve it."""
    costs = layout.costs
    if not layout.sizes:
        ranks, traits = ranks_of(costs), layout_traits(costs)
        sizes = layout.layers.dealt(ranks)
        if layout.layers.may_hold(sizes, traits):
            least = layout.layers.bound(sizes, ranks, ends_low=traits.ends_low)
            yield replace(
                one,
                bound_ticks=max(one.bound_ticks, least),
                item=replace(layout, sizes=sizes),
            )
        return
    twin = costs.layout.model_copy(update=_NOTHING_OFFLOADED), layout.sizes
    if twin in state.fitting and _only_lengthens(costs) and twin[0] != costs.layout:
        state.bounds[one.order] = one
        return
    if layout.is_steady:
        return _take(state, one, dealt_candidate(layout))
    own = costs.of_replica
    stages = choose(own, layout.layers.stage_map(layout.sizes))
    if not all(row.fits for row in stage_memory(own, stages, holding(own))):
        state.solved += 1
        return
    if twin[0] == costs.layout:
        state.fitting.add(twin)
    yield Open(
        max(one.bound_ticks, steady_ticks(own, stages)),
        one.order,
        replace(layout, is_steady=True),
    )


def _dealt_per_layer(state: State, one: Open, layout: DealtPerLayer) -> Iterator[Open]:
    """Deal the layers of a layout and bound it by what every rank recomputes, choose that, or solve it."""
    costs, layers = layout.costs, layout.layers
    if not layout.sizes:
        ranks, traits = ranks_of(costs), layout_traits(costs)
        sizes = layers.dealt(ranks)
        numbers = sizes, ranks, traits, layout_held(costs)
        least = layers.least_ticks(*numbers)
        if least is not None and least < state.limit_ticks:
            least = layers.least_ticks(*numbers, layout_first_gradients(costs))
        if least is not None:
            yield Open(
                max(one.bound_ticks, least), one.order, replace(layout, sizes=sizes)
            )
        return
    if not layout.stage_map:
        stage_map = per_layer_stage_map(layout, state.limit_ticks)
        if stage_map is None:
            state.solved += 1
            state.close(one)
        else:
            least = steady_ticks(costs, choose(costs, stage_map))
            yield Open(
                max(one.bound_ticks, least),
                one.order,
                replace(layout, stage_map=stage_map),
            )
        return
    _take(state, one, per_layer_candidate(layout))


def _take(state: State, one: Open, found: Candidate) -> None:
    """The only plan of a layout. Its memory was told by a shorter schedule, (E12): looked at again where it wins."""
    state.solved += 1
    if found.ticks < state.limit_ticks:
        rows = stage_memory(
            own := found.costs.of_replica, choose(own, found.stage_map), found.schedule
        )
        assert all(row.fits for row in rows), "what is shorter holds just as much"
    state.bounds[one.order] = replace(one, bound_ticks=found.ticks)
    state.take(found)


def _only_lengthens(costs: LayoutCosts) -> bool:
    """Offloading makes no step faster: equation (F7)."""
    framework = costs.work.framework
    return not (
        costs.shared or framework.overlaps_reduction or framework.overlaps_gathers
    )


def _unordered(state: State, one: Open, layout: Unordered) -> Iterator[Open]:
    """Bound all orders of a layout, or find the best."""
    if not layout.is_tight:
        least = least_ticks(layout)
        if least is not None:
            yield Open(
                max(one.bound_ticks, least), one.order, replace(layout, is_tight=True)
            )
        return
    found = synthesized(
        layout,
        limit_ticks=state.limit_ticks,
        work=state.synthesis_work,
        seconds=state.seconds_left(),
    )
    state.synthesis_work -= found.work
    if found.candidate is None:
        state.solved += 1
        return
    state.take(found.candidate)
    rest = replace(one, bound_ticks=max(one.bound_ticks, found.bound_ticks))
    state.bounds[one.order] = rest
    if rest.bound_ticks < state.limit_ticks:
        state.unproven.append(rest)
    else:
        state.solved += 1


def dealt_candidate(layout: Dealt) -> Candidate:
    """The only plan of a layout whose stages are dealt and fit, simulated."""
    return _simulated(layout.costs, layout.layers.stage_map(layout.sizes))


def per_layer_stage_map(layout: DealtPerLayer, limit_ticks: int) -> StageMap | None:
    """The only stage map of a layout whose stages and recomputation follow from rules; None when it does not fit, when
    it surely does not beat the limit, or when all layers are in their fastest modes: that is another layout."""
    schedule = holding(layout.costs)
    stage_map = fewest_modes(
        layout.costs, layout.layers, layout.sizes, schedule, limit_ticks=limit_ticks
    )
    return None if stage_map is None or layout.layers.is_twin(stage_map) else stage_map


def per_layer_candidate(layout: DealtPerLayer) -> Candidate:
    """The only plan of a layout whose stage map is chosen, simulated."""
    return _simulated(layout.costs, layout.stage_map)


def _simulated(costs: LayoutCosts, stage_map: StageMap) -> Candidate:
    own = costs.of_replica
    schedule = layout_schedule(own)
    return Candidate(
        costs, schedule, stage_map, evaluate(own, schedule, choose(own, stage_map))
    )


def single(work: Workload, layout: Layout, wish: tuple[str, ...]) -> Open:
    """One layout of the space by itself, where its schedule is bounded with a first lower bound; of no synthesized
    order."""
    costs = layout_costs(work, layout)
    if layout.schedule in BOUNDED:
        modes = choices(costs, wish)
        return Open(
            lower_bound(costs, Totals.of(costs, modes), warm_ups(costs)),
            (),
            Searched(costs, modes),
        )
    if layout.recompute == "per-layer":
        return Open(
            0, (), DealtPerLayer(costs, PerLayer.of(costs, allowed_modes(costs, wish)))
        )
    return Open(
        0, (), Dealt(costs, uniform(costs, uniform_modes(costs, layout.recompute)))
    )
