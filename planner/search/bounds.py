"""Lower bounds of a layout's step, before any stage map is chosen. No stage map of the layout is faster.

With M micro-batches, P stages, u(s) forwards before the first backward on rank s (the schedule's warm-up), per-layer
forward ticks f, cheapest backward ticks b, and W = sum of f + b over all layers:

    (B1)  T >= sum of w(k) over k < s + M w(s): the first micro-batch comes down to s, s works alone, the last gradient
          goes up; hence T >= M w of the longest layer                                                -> lower_bound()
    (B2)  T >= W + (M - u(s)) F(s) + (M - 1) B(s): down the pipe and up again to s, then s works on. Any weights
          q(s) >= 0 that sum to 1 give T >= W + sum of q(s) [...], whose least value over all partitions is
          W + F min(q(s) (M - u(s))) + B (M - 1) min(q(s)); taken with q even, and with q in proportion to 1 / (M - u)
                                                                                                   -> lower_bound()
    (B3)  T >= sum of F(k) over k < s + M w(s) + tail(s): a rank reduces and updates after its own work; the mean over
          all ranks is (M W + sum of all tails) / P                                                -> lower_bound()

All three stand for every stage as constraints in the solver's model too (`planner.search.stages`).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost import LayerCost, LayoutCosts
from planner.schedule import ActionKind, Schedule


def warm_ups(schedule: Schedule) -> tuple[int, ...]:
    """u(s): forwards before the first backward on every rank."""
    counts = []
    for actions in schedule.actions:
        kinds = [action.kind for action in actions]
        first_backward = next(i for i, kind in enumerate(kinds) if kind is not ActionKind.FORWARD)
        counts.append(first_backward)
    return tuple(counts)


def lower_bound(costs: LayoutCosts, modes: Sequence[Sequence[LayerCost]], warm_up: Sequence[int]) -> int:
    """Ticks that no stage map of this layout can beat; `modes` are the allowed choices of every layer."""
    count, stages = costs.micro_batches, len(warm_up)
    forward = sum(options[0].forward_ticks for options in modes)
    backwards = [min(cost.backward_ticks for cost in options) for options in modes]
    backward = sum(backwards)
    work = forward + backward
    longest = max(options[0].forward_ticks + least for options, least in zip(modes, backwards, strict=True))
    mean = -(-(count * work + _all_tails(costs, modes)) // stages)
    return (
        max(count * longest, mean, work + _worked_on(count, forward, backward, warm_up)) + costs.reduction_latency_ticks
    )


def _all_tails(costs: LayoutCosts, modes: Sequence[Sequence[LayerCost]]) -> int:
    """Least sum of all ranks' tails, latency apart: shared parameters are counted once."""
    every = sum(options[0].reduction_ticks + options[0].optimizer_ticks for options in modes)
    return every - sum((len(shared.layers) - 1) * shared.tail_ticks for shared in costs.shared)


def _worked_on(count: int, forward: int, backward: int, warm_up: Sequence[int]) -> int:
    """What (B2) adds to W, with the better of its two weightings, rounded down."""
    stages = len(warm_up)
    even = (forward * min(count - u for u in warm_up) + backward * (count - 1)) // stages
    if min(count - u for u in warm_up) == 0:
        return even
    inverse = [1 / (count - u) for u in warm_up]
    total = sum(inverse)
    fitted = (forward + backward * (count - 1) * min(inverse)) / total
    return max(even, int(fitted * (1 - 1e-9)))
