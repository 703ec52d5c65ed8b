"""Stage maps that are dealt out by a rule instead of searched: several stages per rank, and split backwards.

All layers recompute alike, in mode r; w(l) = f(l) + b(l, r):

    (E1)  start from the contiguous stages with the least sum over s of (sum of w over s)^2            -> even_sizes()
    (E2)  as long as it makes the busiest rank less busy (or, at a tie, the sum of the ranks' squares smaller): take a
          layer from one stage and give it to another, the stages between moving up by one             -> balanced()

Whatever the order, a rank runs nothing before its lowest stage has its first input, and all of its work after that:

    (E3)  T >= sum of F(k) and transfers below the rank's lowest stage s + M w(rank) + tail(rank)     -> map_bound()
    (E4)  where every rank ends with a backward of its lowest stage, that gradient still has the way up:
          T >= the same + sum of B(k) and transfers below s + tail(rank 0)                            -> map_bound()
    (E5)  no rank holds fewer micro-batches when there are more of them, so a short schedule tells what a long one
          holds at least                                                                -> Traits.in_flight, may_hold()
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayoutCosts, StageLayers, StageMap, durations, tail_ticks
from planner.errors import LayoutError
from planner.schedule import ActionKind, Schedule, build, in_flight_per_stage
from planner.search.bounds import room_bytes
from planner.search.segments import LayerModes

_Sizes = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Traits:
    """What a schedule tells without being built for all of its micro-batches."""

    stage_ranks: tuple[int, ...]
    in_flight: tuple[int, ...]
    """Held of every stage, at least: equation (E5)."""
    ends_low: bool
    """Every rank ends with the full backward of its lowest stage."""


@lru_cache(maxsize=4096)
def traits_of(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> Traits:
    """Traits of a schedule of these numbers."""
    short = _short(name, ranks, micro_batches, virtual_stages)
    ends = [(row[-1].stage, row[-1].kind) for row in short.actions]
    lowest = [(short.stages_of(rank)[0], ActionKind.BACKWARD) for rank in range(ranks)]
    return Traits(short.stage_ranks, in_flight_per_stage(short), ends == lowest)


def _short(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """The schedule with as many micro-batches as ranks, or twice as many, if it takes them."""
    for fewer in (ranks, 2 * ranks):
        if fewer < micro_batches:
            with suppress(LayoutError):
                return build(name, ranks=ranks, micro_batches=fewer, virtual_stages=virtual_stages)
    return built(name, ranks, micro_batches, virtual_stages)


@lru_cache(maxsize=64)
def built(name: str, ranks: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """A schedule, built once for all layouts that use it."""
    return build(name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual_stages)


def layout_traits(costs: LayoutCosts) -> Traits:
    """The traits of a layout's schedule."""
    return traits_of(*_numbers(costs))


def layout_schedule(costs: LayoutCosts) -> Schedule:
    """A layout's schedule."""
    return built(*_numbers(costs))


def _numbers(costs: LayoutCosts) -> tuple[str, int, int, int]:
    layout = costs.layout
    return layout.schedule, layout.pipeline_parallel_degree, costs.micro_batches, layout.virtual_stages_per_rank


def dealt_sizes(costs: LayoutCosts, modes: Sequence[LayerModes]) -> tuple[int, ...]:
    """Layers of every stage of a layout by (E1) and (E2)."""
    work = tuple(options[0].forward_ticks + options[0].backward_ticks for options in modes)
    return deal(work, layout_traits(costs).stage_ranks)


def stage_map_of(modes: Sequence[LayerModes], sizes: Sequence[int]) -> StageMap:
    """Stages of so many layers, each layer in the first of its modes."""
    layers = iter(enumerate(options[0].mode for options in modes))
    return tuple(tuple(next(layers) for _ in range(size)) for size in sizes)


def may_hold(costs: LayoutCosts, modes: Sequence[LayerModes], sizes: Sequence[int]) -> bool:
    """False only if some rank of these stages overflows: by OGP and activations alone, without buffers."""
    traits, known = layout_traits(costs), {id(one): one[0] for one in modes}
    ogp, held = (
        np.array([value[id(one)] for one in modes], dtype=np.int64)
        for value in (
            {key: cost.ogp_bytes for key, cost in known.items()},
            {key: cost.activation_bytes for key, cost in known.items()},
        )
    )
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    stages = np.add.reduceat(ogp, starts) + np.array(traits.in_flight) * np.add.reduceat(held, starts)
    ranks = np.bincount(traits.stage_ranks, weights=stages)
    spared = sum((len(shared.layers) - 1) * shared.ogp_bytes for shared in costs.shared)
    return bool(ranks.max() <= room_bytes(costs) + spared)


@lru_cache(maxsize=1024)
def deal(work: tuple[int, ...], stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of every stage by (E1) and (E2).

    Args:
        work: of every layer.
        stage_ranks: pipeline rank of every stage.
    """
    even = even_sizes(np.array(work, dtype=np.int64), len(stage_ranks))
    return tuple(balanced(np.array(work, dtype=np.int64), even, np.array(stage_ranks)).tolist())


def even_sizes(work: _Sizes, stages: int) -> _Sizes:
    """Layers of every stage of the contiguous partition whose stages' squares add up to least: equation (E1).

    Args:
        work: of every layer.
        stages: at most as many as layers.
    """
    total = np.concatenate([[0.0], np.cumsum(work / max(1, work.sum()))])
    width = len(work) - stages + 1
    least = np.full(len(total), np.inf)
    least[0] = 0.0
    came = []
    for stage in range(stages):
        first, last = stage + np.arange(width), stage + 1 + np.arange(width)
        cost = least[first][:, None] + np.square(total[last][None, :] - total[first][:, None])
        cost[first[:, None] >= last[None, :]] = np.inf
        came.append(first[cost.argmin(axis=0)])
        least = np.full(len(total), np.inf)
        least[last] = cost.min(axis=0)
    stops, stop = [], len(work)
    for stage in reversed(range(stages)):
        stops.append(stop)
        stop = int(came[stage][stop - stage - 1])
    return np.diff(np.array([0, *reversed(stops)]))


def balanced(work: _Sizes, sizes: _Sizes, stage_ranks: NDArray[np.intp]) -> _Sizes:
    """Sizes whose busiest rank is less busy, moving one layer at a time: equation (E2)."""
    total = np.concatenate([[0], np.cumsum(work)])
    holds = (stage_ranks[:, None] == np.arange(stage_ranks.max() + 1)[None, :]).astype(np.int64)
    loads = _loads(total, sizes[None, :], holds)
    best = _scores(loads)[0]
    for _ in range(len(work)):
        candidates = sizes[None, :] + _moves(np.flatnonzero(holds[:, loads.argmax()]), len(sizes))
        candidates = candidates[(candidates > 0).all(axis=1)]
        if not len(candidates):
            break
        loads = _loads(total, candidates, holds)
        scores = _scores(loads)
        place = min(range(len(scores)), key=scores.__getitem__)
        if scores[place] >= best:
            break
        best, sizes, loads = scores[place], candidates[place], loads[place]
    return sizes


def _moves(givers: NDArray[np.intp], stages: int) -> _Sizes:
    """Every way to take one layer from one of these stages and give it to another stage."""
    one = np.eye(stages, dtype=np.int64)
    every = (one[None, :, :] - one[givers][:, None, :]).reshape(-1, stages)
    return every[np.any(every != 0, axis=1)]


def _loads(total: _Sizes, sizes: _Sizes, holds: _Sizes) -> _Sizes:
    """Work of every rank, for every row of sizes."""
    stops = np.concatenate([np.zeros((len(sizes), 1), dtype=np.int64), np.cumsum(sizes, axis=1)], axis=1)
    loads: _Sizes = np.diff(total[stops], axis=1) @ holds
    return loads


def _scores(loads: _Sizes) -> list[tuple[int, float]]:
    """(busiest rank, sum of squares) of every row."""
    return list(zip(loads.max(axis=1).tolist(), np.square(loads.astype(float)).sum(axis=1).tolist(), strict=True))


def map_bound(costs: LayoutCosts, traits: Traits, stages: Sequence[StageLayers]) -> int:
    """Ticks that these stages take at least: equations (E3) and (E4)."""
    ranks = traits.stage_ranks
    spent = durations(costs, stages)
    held = [[s for s, owner in enumerate(ranks) if owner == rank] for rank in range(max(ranks) + 1)]
    tails = [sum(parts) for parts in tail_ticks(costs, [[one for s in mine for one in stages[s]] for mine in held])]
    forward = np.array(spent.forward)
    backward = np.array(spent.backward_input) + np.array(spent.backward_weight) + np.array(spent.recompute)
    down, up = _way(ranks, forward, spent.transfer_forward), _way(ranks, backward, spent.transfer_backward)
    bound = 0
    for mine, tail in zip(held, tails, strict=True):
        done = down[mine[0]] + costs.micro_batches * int((forward + backward)[mine].sum())
        bound = max(bound, done + tail, done + up[mine[0]] + tails[0] if traits.ends_low else 0)
    return bound


def _way(ranks: Sequence[int], spent: _Sizes, transfers: Sequence[float]) -> list[int]:
    """Ticks of one action of every stage before each stage, and transfers; what stays on a rank needs no transfer."""
    moves = [0 if ranks[s] == ranks[s + 1] else int(transfers[s]) for s in range(len(ranks) - 1)]
    return [0, *np.cumsum(spent[:-1] + np.array(moves, dtype=np.int64)).tolist()]
