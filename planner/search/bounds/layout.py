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

    (B5)  of the (k - 1) P + 1 longest layers some rank holds k: T >= sum of M w + tail over the k shortest of them, for
          every k (the pigeonhole bound of P || Cmax: Dell'Amico, Martello 1995)             -> Totals.fullest()

    (B6)  what fits holds at most A bytes of activations per micro-batch, the most that may_fit() finds room for; so
          all b together are no less than what a fractional choice of modes that keeps A bytes takes (the linear
          relaxation of the multiple-choice knapsack: Sinha, Zoltners 1979); (B2), (B3) hold with that
                                                                                                -> least_backward()

    (B4)  T >= sum of f + b - w over all layers, w the weight gradient: one micro-batch goes down and up, and a schedule
          that splits the backward lets nobody wait for w; with Q sequence chunks the first one goes down and up, which
          is C(1) of (Q2)                                                                        -> any_order_bound()

They are cheap and weak; a layout that they leave open is bounded over its segments next (`stage_maps.paths`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from operator import sub
from typing import Self

from planner.cost import LayerCost, LayoutCosts, reserved_bytes
from planner.cost.offload import is_offloading
from planner.errors import UnsupportedError

BOUNDED = ("gpipe", "1f1b")
"""Schedules whose bounds are known: those that the search may choose."""


def warm_ups(costs: LayoutCosts) -> tuple[int, ...]:
    """u(s): forwards before the first backward on every rank; for both schedules also the most units in flight.

    Told without building the schedule, since the bound is asked for every layout of the space.
    """
    name, ranks = costs.layout.schedule, costs.layout.pipeline_parallel_degree
    if name not in BOUNDED:
        raise UnsupportedError(
            f"no bound is known for the schedule {name!r}.",
            field="schedule",
            hint=f"use {' or '.join(BOUNDED)}.",
        )
    if name == "gpipe":
        return (costs.micro_batches,) * ranks
    return tuple(min(costs.micro_batches, ranks - rank) for rank in range(ranks))


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all layers of a layout, each in the cheapest of its allowed modes."""

    forward: int
    backward: int
    passing: int
    """Of f + b - w."""
    longest: int
    """f + b of the longest layer."""
    tails: int
    spared_ticks: int
    """Of the tails, by ranks that hold several users of a shared parameter."""
    kinds: tuple[tuple[int, int, int], ...]
    """(f + b, tail, number) of the distinct layers."""
    ogp_bytes: int
    activation_bytes: int
    """In the leanest mode."""
    fastest_bytes: int
    """Of activations in the mode whose backward takes least."""
    host_states_bytes: int
    host_activation_bytes: int
    """Likewise."""
    counted: tuple[tuple[Sequence[LayerCost], int], ...]
    """The distinct layers, and their number."""
    known: dict[tuple[int, int], int] = field(
        default_factory=dict, repr=False, compare=False
    )
    """`fullest`, by micro-batches and pipeline ranks: layouts that differ in their order alone share it."""
    sorted_trades: list[tuple[float, int]] = field(
        default_factory=list, repr=False, compare=False
    )
    """`trades` of all layers, the cheapest first, once they were asked for."""

    @classmethod
    def of(cls, costs: LayoutCosts, modes: Sequence[Sequence[LayerCost]]) -> Self:
        """Identical layers share their choices, and are looked at once."""
        counted = [(modes[first], count) for first, count in costs.kinds]
        works = [
            work_of(options, costs.layout.sequence_chunks) for options, _ in counted
        ]
        tails = [costs.least_tail_ticks(options[0]) for options, _ in counted]
        kinds = tuple(
            (work, tail, count)
            for (work, _), tail, (_, count) in zip(works, tails, counted, strict=True)
        )
        spared = [(len(shared.layers) - 1, shared) for shared in costs.shared]
        spared_ticks = sum(times * shared.tail_ticks for times, shared in spared)
        return cls(
            forward=sum(count * options[0].forward_ticks for options, count in counted),
            backward=sum(
                count * min(cost.backward_ticks for cost in options)
                for options, count in counted
            ),
            passing=sum(
                count * passing
                for (_, passing), (_, count) in zip(works, counted, strict=True)
            ),
            longest=max(work for work, _ in works),
            tails=sum(tail * count for _, tail, count in kinds) - spared_ticks,
            spared_ticks=spared_ticks,
            kinds=kinds,
            ogp_bytes=sum(count * options[0].ogp_bytes for options, count in counted)
            - sum(times * shared.ogp_bytes for times, shared in spared),
            activation_bytes=sum(
                count * min(cost.activation_bytes for cost in options)
                for options, count in counted
            ),
            fastest_bytes=sum(
                count
                * min((cost.backward_ticks, cost.activation_bytes) for cost in options)[
                    1
                ]
                for options, count in counted
            ),
            host_states_bytes=sum(
                count * options[0].host_optimizer_bytes for options, count in counted
            )
            - sum(times * shared.host_optimizer_bytes for times, shared in spared),
            host_activation_bytes=sum(
                count * min(cost.host_activation_bytes for cost in options)
                for options, count in counted
            ),
            counted=tuple(counted),
        )

    def mean(self, costs: LayoutCosts, backward: int) -> int:
        """What every rank does on average: (B3)."""
        work = costs.micro_batches * (self.forward + backward) + self.tails
        return -(-work // costs.layout.pipeline_parallel_degree)

    def fullest(self, costs: LayoutCosts) -> int:
        """What some rank does at least: (B5)."""
        key = costs.micro_batches, costs.layout.pipeline_parallel_degree
        if key not in self.known:
            self.known[key] = self._fullest(*key)
        return self.known[key]

    def _fullest(self, micro_batches: int, ranks: int) -> int:
        longest = sorted(
            ((micro_batches * work + tail, count) for work, tail, count in self.kinds),
            reverse=True,
        )
        totals = [
            0,
            *accumulate(
                chain.from_iterable(repeat(ticks, count) for ticks, count in longest)
            ),
        ]
        if ranks == 1:
            return totals[-1] - self.spared_ticks
        # The k shortest of the (k - 1) ranks + 1 longest: all of these but the (k - 1) (ranks - 1) longest.
        most: int = max(map(sub, totals[1::ranks], totals[:: ranks - 1]))
        return most - self.spared_ticks


def work_of(options: Iterable[LayerCost], chunks: int = 1) -> tuple[int, int]:
    """Fewest ticks of a layer for one micro-batch: of all its work, and of what the layers before it wait for."""
    choices = list(options)
    work = min(cost.forward_ticks + cost.backward_ticks for cost in choices)
    return work, min(
        sum(first_chunk(cost, chunks)[:2]) - first_chunk(cost, chunks)[2]
        for cost in choices
    )


def first_chunk(cost: LayerCost, chunks: int) -> tuple[int, int, int]:
    """Forward, backward and its weight gradient of a micro-batch's first chunk, at least: equation (Q2)."""
    if chunks == 1:
        return cost.forward_ticks, cost.backward_ticks, cost.backward_weight_ticks
    seen, weight = cost.attention, cost.backward_weight_ticks
    forward = (
        cost.forward_ticks - seen.forward_ticks
    ) // chunks + seen.forward_ticks // chunks**2
    of_input = (
        cost.backward_ticks - weight - seen.backward_ticks
    ) // chunks + seen.backward_ticks // chunks**2
    return forward, of_input + weight // chunks, weight // chunks


def any_order_bound(
    costs: LayoutCosts, totals: Totals, in_flight: Sequence[float] | None = None
) -> int:
    """Ticks that no stage map beats under any schedule, with any number of stages per rank: (B1), (B3)'s mean, (B4)
    and (B5); with micro-batches that every rank holds at least, also (B6)."""
    backward = totals.backward
    if in_flight is not None:
        backward = least_backward(
            totals, _most_activations(room_bytes(costs), totals.ogp_bytes, in_flight)
        )
    waits = _waiting_ticks(costs)
    bound = max(
        costs.micro_batches * totals.longest + waits,
        totals.mean(costs, backward) + waits,
        totals.fullest(costs) + waits,
        totals.passing,
    )
    return bound + costs.fixed_tail_ticks


def lower_bound(costs: LayoutCosts, totals: Totals, warm_up: Sequence[int]) -> int:
    """Ticks that no stage map of this layout that fits can beat: (B1) to (B3), (B5) and (B6)."""
    count = costs.micro_batches
    backward = least_backward(
        totals, _most_activations(room_bytes(costs), totals.ogp_bytes, warm_up)
    )
    turned = (
        totals.forward + backward + _worked_on(count, totals.forward, backward, warm_up)
    )
    waits = _waiting_ticks(costs)
    bound = max(
        count * totals.longest + waits,
        totals.mean(costs, backward) + waits,
        totals.fullest(costs) + waits,
        turned,
    )
    return bound + costs.fixed_tail_ticks


def _waiting_ticks(costs: LayoutCosts) -> int:
    """Return what every rank waits for its neighbours at least, as it runs every micro-batch: (S1)."""
    parts = costs.columns or costs.ranks
    if parts:
        return min(map(_waiting_ticks, parts))
    return 2 * costs.micro_batches * costs.waiting_ticks


def least_backward(totals: Totals, room_bytes: float) -> int:
    """Backward ticks of all layers that keep at most so many bytes of activations: equation (B6), rounded down."""
    missing, ticks = totals.fastest_bytes - room_bytes, 0.0
    if missing <= 0:
        return totals.backward
    if not totals.sorted_trades:
        every = (
            (rate, count * freed)
            for options, count in totals.counted
            for rate, freed in trades(options)
        )
        totals.sorted_trades.extend(sorted(every))
    for rate, freed in totals.sorted_trades:
        if missing <= 0:
            break
        ticks += rate * min(freed, missing)
        missing -= freed
    return totals.backward + int(ticks * (1 - 1e-9))


def trades(options: Sequence[LayerCost]) -> list[tuple[float, int]]:
    """(ticks per byte, bytes freed) of a layer's modes, the cheapest first: the lower convex hull of all."""
    ticks, kept = min((cost.backward_ticks, cost.activation_bytes) for cost in options)
    found: list[tuple[float, int]] = []
    while leaner := [cost for cost in options if cost.activation_bytes < kept]:
        best = min(
            leaner,
            key=lambda cost: (
                (cost.backward_ticks - ticks) / (kept - cost.activation_bytes)
            ),
        )
        found.append(
            (
                (best.backward_ticks - ticks) / (kept - best.activation_bytes),
                kept - best.activation_bytes,
            )
        )
        ticks, kept = best.backward_ticks, best.activation_bytes
    return found


def _worked_on(count: int, forward: int, backward: int, warm_up: Sequence[int]) -> int:
    """What (B2) adds to W, with the better of its two weightings, rounded down."""
    stages = len(warm_up)
    even = (
        forward * min(count - u for u in warm_up) + backward * (count - 1)
    ) // stages
    if min(count - u for u in warm_up) == 0:
        return even
    inverse = [1 / (count - u) for u in warm_up]
    total = sum(inverse)
    fitted = (forward + backward * (count - 1) * min(inverse)) / total
    return max(even, int(fitted * (1 - 1e-9)))


def room_bytes(costs: LayoutCosts) -> int:
    """What OGP, activations and the layers' own temporaries of a device may take together; of several, the most."""
    if parts := costs.columns or costs.ranks:
        return max(map(room_bytes, parts))
    workspace = int(costs.work.constants.workspace_bytes)
    return (
        costs.work.capacity_bytes
        - reserved_bytes(costs.work)
        - costs.gathered_bytes
        - workspace
    )


def host_room_bytes(costs: LayoutCosts) -> int | None:
    """What a device may keep in its host's memory, of several the most; None: it keeps nothing there."""
    if is_offloading(costs.layout) and (parts := costs.columns or costs.ranks):
        return max(
            (each for each in map(host_room_bytes, parts) if each is not None),
            default=None,
        )
    return costs.work.host_capacity_bytes if is_offloading(costs.layout) else None


def may_fit(costs: LayoutCosts, totals: Totals, in_flight: Sequence[float]) -> bool:
    """False only if no stage map can fit: a relaxation that spreads bytes freely over the stages, in the devices'
    memory and in the hosts'."""
    host = host_room_bytes(costs)
    if host is not None:
        on_host = _most_activations(host, totals.host_states_bytes, in_flight)
        if totals.host_activation_bytes > on_host:
            return False
    return totals.activation_bytes <= _most_activations(
        room_bytes(costs), totals.ogp_bytes, in_flight
    )


def _most_activations(room: int, ogp: int, in_flight: Sequence[float]) -> float:
    """Bytes of one micro-batch's activations for which there may be room on all stages together; less than none: OGP
    alone does not fit.

    A stage with o bytes of OGP has room for at most (room - o) / in_flight bytes of activations per micro-batch; so the
    most activations fit when the OGP lies where most micro-batches are in flight.

    Args:
        room: of one device, in bytes.
        ogp: of all layers, in bytes.
        in_flight: micro-batches of every stage.
    """
    if room < 0 or ogp > room * len(in_flight):
        return -1.0
    space = 0.0
    for units in sorted(in_flight, reverse=True):
        taken = min(room, ogp)
        ogp -= taken
        space += (room - taken) / units
    return space
