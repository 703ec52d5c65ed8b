"""Every stage that a layout could have: contiguous layers [i, j) on pipeline rank s, with its ticks and its bytes.

With L layers, P ranks and D = L - P + 1, rank s can start at layer s + x and end before layer s + 1 + y, where
0 <= x <= y < D: tables are indexed [s, x, y]. What a segment costs does not depend on the other stages, so a stage map
is a path x(0) = 0, y(s) = x(s + 1), y(P - 1) = D - 1 through the tables (`planner.search.paths`).

    (G1)  forward, tail, transfer, bytes: sums over the segment's layers, equations (T1)-(T5), (S3), (M1)-(M3)
    (G2)  backward(s, i, j) = least sum of b(l, r(l)) over recompute modes r that fit the memory: more recomputation
          never makes a step faster, so of all choices that fit the cheapest is best, stage by stage -> backward
    (G3)  a segment fits if it fits with the modes that need least memory                            -> least_bytes
    (G4)  when the layers of a segment that can recompute are not all alike, (G2) is a knapsack: the table holds a lower
          bound, and `planner.search.recompute` solves those segments that the search really asks for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost import RECEIVE_BUFFERS, LayerCost, LayoutCosts
from planner.spec.profile import RecomputeMode

Table = NDArray[np.int64]
Mask = NDArray[np.bool_]
LayerModes = tuple[LayerCost, ...]
"""The allowed recompute choices of one layer, from least to most recomputation."""


def allowed_modes(costs: LayoutCosts, wish: Sequence[str]) -> tuple[LayerModes, ...]:
    """Choices of every layer under a recompute wish: ``none``, ``full``, or ``per-layer`` for any mix.

    A layer that does not offer the wished mode (an embedding has nothing to recompute) keeps those it has.
    """
    known: dict[int, LayerModes] = {}
    result = []
    for options in costs.layers:
        if id(options) not in known:
            wished = tuple(cost for mode, cost in options.items() if "per-layer" in wish or mode in wish)
            known[id(options)] = wished or tuple(options.values())
        result.append(known[id(options)])
    return tuple(result)


@dataclass(frozen=True)
class Segments:
    """The tables of one layout."""

    costs: LayoutCosts
    modes: tuple[LayerModes, ...]
    in_flight: tuple[int, ...]
    room_bytes: int
    """What OGP, activations and temporaries of a device may take together."""

    @property
    def stages(self) -> int:
        """P."""
        return self.costs.layout.pipeline_parallel_degree

    @property
    def width(self) -> int:
        """D."""
        return len(self.modes) - self.stages + 1

    @cached_property
    def starts(self) -> Table:
        """First layer i of every segment, [s, x, 1]."""
        return (np.arange(self.stages)[:, None] + np.arange(self.width)[None, :])[:, :, None]

    @cached_property
    def stops(self) -> Table:
        """Layer j behind every segment, [s, 1, y]."""
        return self.starts.reshape(self.stages, 1, self.width) + 1

    @cached_property
    def is_segment(self) -> Mask:
        """Segments that exist: at least one layer, rank 0 from the first layer, the last rank to the last."""
        exists = self.stops > self.starts
        exists[0, 1:, :] = False
        exists[-1, :, :-1] = False
        return exists

    def _sums(self, value: Callable[[LayerModes], int]) -> Table:
        """Sum of a layer's value over every segment."""
        prefix = np.concatenate([[0], np.cumsum([value(options) for options in self.modes], dtype=np.int64)])
        return _differences(prefix, self.starts, self.stops)

    def _largest(self, value: Callable[[LayerModes], int]) -> Table:
        """Largest of a layer's value over every segment."""
        count = len(self.modes)
        values = np.array([value(options) for options in self.modes], dtype=np.int64)
        ranges = np.zeros((count + 1, count + 1), dtype=np.int64)
        for first in range(count):
            ranges[first, first + 1 :] = np.maximum.accumulate(values[first:])
        table: Table = ranges[self.starts, self.stops]
        return table

    @cached_property
    def forward(self) -> Table:
        """F of every segment."""
        return self._sums(lambda options: options[0].forward_ticks)

    @cached_property
    def transfer(self) -> Table:
        """Ticks of the boundary behind every segment, [s, 1, y]; zero behind the last rank."""
        table = np.zeros((self.stages, 1, self.width), dtype=np.int64)
        for s in range(self.stages - 1):
            table[s, 0] = [self.costs.transfer_ticks(s, int(stop) - 1) for stop in self.stops[s, 0]]
        return table

    @cached_property
    def tail(self) -> Table:
        """Gradient reduction and optimizer behind every segment: equation (S3)."""
        tail = self._sums(lambda options: options[0].reduction_ticks + options[0].optimizer_ticks)
        tail = tail + self.costs.reduction_latency_ticks
        for shared in self.costs.shared:
            users = self._users(shared.layers)
            tail = tail - np.maximum(users - 1, 0) * shared.tail_ticks
            tail = tail + ((users > 0) & (users < len(shared.layers))) * shared.exchange_ticks
        return tail

    def _users(self, layers: Sequence[int]) -> Table:
        """How many of these layers every segment holds."""
        marks = np.zeros(len(self.modes), dtype=np.int64)
        marks[list(layers)] = 1
        prefix = np.concatenate([[0], np.cumsum(marks)])
        return _differences(prefix, self.starts, self.stops)

    @cached_property
    def fixed_bytes(self) -> Table:
        """Bytes of every segment that no recompute choice changes: OGP, outputs in flight, receive buffers."""
        ogp = self._sums(lambda options: options[0].ogp_bytes)
        for shared in self.costs.shared:
            ogp = ogp - np.maximum(self._users(shared.layers) - 1, 0) * shared.ogp_bytes
        behind = np.array([0, *(self.costs.boundary_bytes(layer) for layer in range(len(self.modes)))], dtype=np.int64)
        incoming, outgoing = behind[self.starts], behind[self.stops]
        received = np.where(np.arange(self.stages)[:, None, None] < self.stages - 1, incoming + outgoing, incoming)
        table: Table = ogp + self._units * outgoing + RECEIVE_BUFFERS * received
        return table

    @property
    def _units(self) -> Table:
        return np.array(self.in_flight, dtype=np.int64)[:, None, None]

    @cached_property
    def least_bytes(self) -> Table:
        """Least peak of every segment over all recompute choices, reserved bytes apart: equation (G3).

        For each bound t on the temporaries of layers that can recompute, each of them takes the mode of least
        activations among those within t; the largest temporary of the other layers of a segment is what it is.
        """
        most = np.int64(2**62)
        best = np.full(np.broadcast_shapes(self.starts.shape, self.stops.shape), most)
        others = self._largest(lambda options: options[0].temporary_bytes if len(options) == 1 else 0)
        for threshold in self._thresholds():
            allowed = [
                [cost for cost in options if len(options) == 1 or cost.temporary_bytes <= threshold]
                for options in self.modes
            ]
            least = [min((cost.activation_bytes for cost in fit), default=-1) for fit in allowed]
            prefix = np.concatenate([[0], np.cumsum([max(0, value) for value in least], dtype=np.int64)])
            missing = np.concatenate([[0], np.cumsum([value < 0 for value in least], dtype=np.int64)])
            held = self._units * (prefix[self.stops] - prefix[self.starts])
            total = self.fixed_bytes + held + np.maximum(others, threshold)
            possible = missing[self.stops] == missing[self.starts]
            best = np.minimum(best, np.where(possible, total, most))
        return best

    def _thresholds(self) -> list[int]:
        """Temporaries of layers that can recompute; 0 stands for segments without such layers."""
        return sorted({0} | {cost.temporary_bytes for options in self.choosers for cost in options})

    @cached_property
    def fits(self) -> Mask:
        """Segments that exist and have a recompute choice within the capacity."""
        return self.is_segment & (self.least_bytes <= self.room_bytes)

    @cached_property
    def choosers(self) -> tuple[LayerModes, ...]:
        """Distinct layers with a recompute choice."""
        return tuple(dict.fromkeys(options for options in self.modes if len(options) > 1))

    @cached_property
    def backward(self) -> Table:
        """Least B of every segment that fits its memory; a lower bound where `is_exact` is false: equation (G2)."""
        return self._with_recompute[0]

    @cached_property
    def is_exact(self) -> Mask:
        """Segments whose `backward` is reached by a recompute choice that fits."""
        return self._with_recompute[1]

    @cached_property
    def _with_recompute(self) -> tuple[Table, Mask]:
        cheapest = self._sums(lambda options: min(cost.backward_ticks for cost in options))
        room = self.room_bytes
        plain = self.fixed_bytes + self._units * self._sums(lambda options: options[0].activation_bytes)
        missing = plain + self._largest(lambda options: options[0].temporary_bytes) - room
        if len(self.choosers) == 1 and _is_simple(self.choosers[0]):
            return self._one_kind(cheapest, plain - room, missing)
        needed = np.maximum(0, plain + self._largest(_least_temporary) - room) / self._units
        extra = np.floor(needed * min(map(_least_rate, self.choosers), default=0.0) * (1 - 1e-9))
        none_is_cheapest = all(options[0].backward_ticks == _cheapest(options) for options in self.choosers)
        return cheapest + extra.astype(np.int64), (missing <= 0) & none_is_cheapest

    def _one_kind(self, cheapest: Table, over: Table, missing: Table) -> tuple[Table, Mask]:
        """Only one kind of layer can recompute: the fewest layers r that free enough, in closed form."""
        none, full = self.choosers[0]
        count = self._sums(lambda options: int(len(options) > 1))
        saved = np.maximum(1, self._units * (none.activation_bytes - full.activation_bytes))
        others = self._largest(lambda options: options[0].temporary_bytes if len(options) == 1 else 0)
        mixed = np.maximum(others, max(none.temporary_bytes, full.temporary_bytes))
        some = np.maximum(1, -(-(over + mixed) // saved))
        chosen = np.where(missing <= 0, 0, np.where(some < count, some, count))
        return cheapest + chosen * (full.backward_ticks - none.backward_ticks), np.ones(cheapest.shape, bool)

    def layers(self, stage: int, x: int, y: int) -> range:
        """Layer indices of a segment."""
        return range(stage + x, stage + 1 + y)

    def uniform_modes(self, stage: int, x: int, y: int) -> tuple[tuple[int, RecomputeMode], ...] | None:
        """The modes behind `backward` when one kind at most can recompute: its first layers do; None otherwise."""
        if not self.is_exact[stage, x, y]:
            return None
        layers = self.layers(stage, x, y)
        extra = int(self.backward[stage, x, y]) - sum(self.modes[layer][0].backward_ticks for layer in layers)
        chosen = []
        for layer in layers:
            options = self.modes[layer]
            step = options[-1].backward_ticks - options[0].backward_ticks if len(options) > 1 else 0
            recomputes = len(options) > 1 and extra >= step > 0
            extra -= step if recomputes else 0
            chosen.append((layer, (options[-1] if recomputes else options[0]).mode))
        return tuple(chosen)


def _differences(prefix: Table, starts: Table, stops: Table) -> Table:
    """Sums over [start, stop) from running totals."""
    table: Table = prefix[stops] - prefix[starts]
    return table


def _is_simple(options: LayerModes) -> bool:
    """Two modes, of which the second trades time for memory."""
    none, more = options[0], options[-1]
    trades = more.backward_ticks > none.backward_ticks and more.activation_bytes <= none.activation_bytes
    return len(options) == 2 and trades


def _cheapest(options: LayerModes) -> int:
    return min(cost.backward_ticks for cost in options)


def _least_temporary(options: LayerModes) -> int:
    return min(cost.temporary_bytes for cost in options)


def _least_rate(options: LayerModes) -> float:
    """Fewest ticks per byte that a layer's recomputation frees; 0 when some mode frees bytes for nothing."""
    rates = [
        max(0.0, (more.backward_ticks - _cheapest(options)) / saved)
        for more in options[1:]
        if (saved := options[0].activation_bytes - more.activation_bytes) > 0
    ]
    return min(rates, default=0.0)
