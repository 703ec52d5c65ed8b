"""Every stage that a layout could have: contiguous layers [i, j) on pipeline rank s, with its ticks and its bytes.

Rank s can start before layer least(s) + x and end before layer least(s + 1) + y, where the windows of
`stage_maps.windows` hold x and y: tables are indexed [s, x, y]. What a segment costs does not depend on the other
stages, so a stage map is a path x(0) = 0, y(s) = x(s + 1), y(P - 1) = 0 through the tables (`stage_maps.paths`).

    (G1)  forward, tail, transfer, bytes: sums over the segment's layers, equations (T1)-(T5), (S3), (M1)-(M3)
    (G2)  backward(s, i, j) = least sum of b(l, r(l)) over recompute modes r that fit the memory: more recomputation
          never makes a step faster, so of all choices that fit the cheapest is best, stage by stage -> backward
    (G3)  a segment fits if it fits with the modes that need least memory                            -> least_bytes
    (G4)  when the layers of a segment that can recompute are not all alike, (G2) is a knapsack: the table holds a lower
          bound (`stage_maps.knapsack`), and `stage_maps.recompute` solves those segments that are asked for
    (G5)  when they are all alike, only the numbers of layers in every mode count: all ways to share n layers out over
          the modes, sorted by the bytes that they keep, with the least ticks so far, answer (G2) by bisection -> _mix()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.cost import LayerCost, LayoutCosts, receive_buffers
from planner.search.stage_maps.knapsack import Relief
from planner.search.stage_maps.windows import Kinds, Windows
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
    for first, _ in costs.kinds:
        options = costs.layers[first]
        wished = tuple(
            [
                cost
                for mode, cost in options.items()
                if "per-layer" in wish or mode in wish
            ]
        )
        known[first] = wished or tuple(options.values())
    return tuple(map(known.__getitem__, costs.alike))


def uniform_modes(costs: LayoutCosts, mode: str) -> tuple[LayerModes, ...]:
    """The one choice of every layer when all recompute alike; one that does not offer the mode keeps its least."""
    allowed = allowed_modes(costs, (mode,))
    first = {index: allowed[index][:1] for index, _ in costs.kinds}
    return tuple(map(first.__getitem__, costs.alike))


def choices(costs: LayoutCosts, wish: Sequence[str]) -> tuple[LayerModes, ...]:
    """Recompute choices of every layer: those wished for, or the one mode that the layout has for all."""
    mode = costs.layout.recompute
    return (
        allowed_modes(costs, wish)
        if mode == "per-layer"
        else uniform_modes(costs, mode)
    )


@dataclass(frozen=True)
class Segments:
    """The tables of one layout."""

    costs: LayoutCosts
    modes: tuple[LayerModes, ...]
    in_flight: tuple[int, ...]
    room_bytes: int
    """What OGP, activations and temporaries of a device may take together."""
    windows: Windows
    """Where ranks can start."""
    first: int = 0
    """Pipeline rank of the first row; rows are those of `in_flight`."""
    host_room_bytes: int | None = None
    """What a device may keep in its host's memory; None: nothing is kept there, or as much as it takes."""

    def on_rank(self, rank: int) -> Segments:
        """The segments of this rank's device: all devices are alike."""
        return self

    @property
    def stages(self) -> int:
        """P."""
        return len(self.in_flight)

    @cached_property
    def kinds(self) -> Kinds:
        """Distinct layers."""
        return Kinds.of(self.modes)

    @cached_property
    def _places(self) -> Table:
        """Layer behind every boundary, [s, x]; those outside the boundary's window stand behind the last layer."""
        least, most = (
            np.array(self.windows.least)[:, None],
            np.array(self.windows.most)[:, None],
        )
        places = least + np.arange(self.windows.width)[None, :]
        inside: Table = np.where(places <= most, places, len(self.modes))
        return inside

    @cached_property
    def starts(self) -> Table:
        """First layer i of every segment, [s, x, 1]."""
        return self._places[:-1, :, None]

    @cached_property
    def stops(self) -> Table:
        """Layer j behind every segment, [s, 1, y]."""
        return self._places[1:, None, :]

    @cached_property
    def is_segment(self) -> Mask:
        """Segments that exist: at least one layer, within the windows."""
        inside = np.arange(self.windows.width)[None, :] <= self._spans[:, None]
        return (self.stops > self.starts) & inside[:-1, :, None] & inside[1:, None, :]

    @property
    def _spans(self) -> Table:
        """Largest x of every boundary."""
        spans: Table = np.array(self.windows.most) - np.array(self.windows.least)
        return spans

    def path(self, sizes: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
        """(x, y) of stages of so many layers; None when they leave the windows."""
        behind = np.concatenate([[0], np.cumsum(sizes)]) - np.array(self.windows.least)
        return (
            tuple(pairwise(behind.tolist()))
            if ((behind >= 0) & (behind <= self._spans)).all()
            else None
        )

    def _sums(self, value: Callable[[LayerModes], int]) -> Table:
        """Sum of a layer's value over every segment."""
        return _differences(self._totals(value), self.starts, self.stops)

    def _totals(self, value: Callable[[LayerModes], int]) -> Table:
        """Sum of a layer's value over all before each."""
        return self.kinds.sums([value(options) for options in self.kinds.options])

    def _largest(self, value: Callable[[LayerModes], int]) -> Table:
        """Largest of a layer's value over every segment: of two runs of 2^k layers that together cover it."""
        values = np.array(
            [value(options) for options in self.kinds.options], dtype=np.int64
        )
        if len(values) == 1 or (values == values[0]).all():
            return np.full(self.is_segment.shape, values[0])
        runs = [values[self.kinds.places]]
        while 2 ** len(runs) <= len(self.modes):
            half, longest = 2 ** (len(runs) - 1), runs[-1]
            runs.append(
                np.concatenate(
                    [np.maximum(longest[:-half], longest[half:]), longest[-half:]]
                )
            )
        table, powers = np.stack(runs), self._powers
        first, second = (
            np.minimum(self.starts, len(self.modes) - 1),
            self.stops - 2**powers,
        )
        largest: Table = np.maximum(
            table[powers, first], table[powers, np.maximum(0, second)]
        )
        return largest

    @cached_property
    def _powers(self) -> Table:
        """Largest k with 2^k layers in every segment."""
        powers: Table = (
            np.frexp(np.maximum(1, self.stops - self.starts))[1].astype(np.int64) - 1
        )
        return powers

    @cached_property
    def forward(self) -> Table:
        """F of every segment."""
        forward = self._sums(lambda options: options[0].forward_ticks)
        return forward + self.costs.waiting_ticks

    @cached_property
    def transfer(self) -> Table:
        """Ticks of the boundary behind every segment, [s, 1, y]; zero behind the last rank."""
        table = np.zeros((self.stages, 1, self.windows.width), dtype=np.int64)
        for s in range(self.stages - 1):
            table[s, 0] = np.array(self.costs.transfers_behind(s), dtype=np.int64)[
                self.stops[s, 0] - 1
            ]
        return table

    @cached_property
    def tail(self) -> Table:
        """Gradient reduction and optimizer behind every segment: equation (S3)."""
        tail = self._sums(
            lambda options: options[0].reduction_ticks + options[0].optimizer_ticks
        )
        tail = tail + self.costs.fixed_tail_ticks - self._hidden()
        for shared in self.costs.shared:
            users = self._users(shared.layers)
            tail = tail - np.maximum(users - 1, 0) * shared.tail_ticks
            tail = (
                tail
                + ((users > 0) & (users < len(shared.layers))) * shared.exchange_ticks
            )
        return tail

    def _hidden(self) -> Table | int:
        """Return the ticks of reductions that run beside compute: equation (S5).

        They grow by less than the backward they run beside. So where `backward` is a
        lower bound, what ends with a backward and the tail is bounded from below, too.
        """
        framework = self.costs.work.framework
        hidden: Table | int = 0
        if framework.overlaps_reduction:
            reduced = self._sums_behind_first(
                lambda options: options[0].reduction_ticks - options[0].update_ticks
            )
            hidden = hidden + self._hidden_beside(self.backward, reduced)
        if framework.overlaps_gathers:
            gathered = self._sums_behind_first(lambda options: options[0].update_ticks)
            hidden = hidden + self._hidden_beside(self.forward, gathered)
        return hidden

    def _hidden_beside(self, compute: Table, exchanged: Table) -> Table:
        share = self.costs.work.constants.overlap_fraction
        work = compute - self.costs.waiting_ticks
        hidden: Table = np.minimum(exchanged, (share * work).astype(np.int64))
        return hidden

    def _sums_behind_first(self, value: Callable[[LayerModes], int]) -> Table:
        """Sum of a layer's value over every segment without its first layer."""
        totals = self._totals(value)
        behind = np.minimum(self.starts + 1, len(self.modes))
        return _differences(totals, behind, np.maximum(behind, self.stops))

    def reprice(self, stage: int, x: int, y: int, backward: int) -> None:
        """Set the exact backward of one segment, and the tail that follows from it."""
        self.backward[stage, x, y] = backward + self.costs.waiting_ticks
        self.is_exact[stage, x, y] = False
        if self.costs.work.framework.overlaps_reduction:
            self.__dict__.pop("tail", None)

    def _users(self, layers: Sequence[int]) -> Table:
        """How many of these layers every segment holds."""
        marks = np.zeros(len(self.modes), dtype=np.int64)
        marks[list(layers)] = 1
        prefix = np.concatenate([[0], np.cumsum(marks)])
        return _differences(prefix, self.starts, self.stops)

    @cached_property
    def fixed_bytes(self) -> Table:
        """Bytes of every segment that no recompute choice changes: OGP, outputs in flight, receive buffers; where
        activations are offloaded (O2), inputs in flight, too."""
        ogp = self._sums(lambda options: options[0].ogp_bytes)
        for shared in self.costs.shared:
            ogp = ogp - np.maximum(self._users(shared.layers) - 1, 0) * shared.ogp_bytes
        behind = np.array([0, *self.costs.all_boundary_bytes()], dtype=np.int64)
        incoming, outgoing = behind[self.starts], behind[self.stops]
        is_last = (
            np.arange(self.stages)
            == self.costs.layout.pipeline_parallel_degree - 1 - self.first
        )
        received = np.where(is_last[:, None, None], incoming, incoming + outgoing)
        kept = np.zeros_like(outgoing)
        if not self.costs.work.framework.frees_outputs:
            kept = kept + outgoing
        if self.costs.layout.activation_offload:
            kept = kept + incoming
        buffers = receive_buffers(self.costs.work)
        table: Table = ogp + self._units * kept + buffers * received
        return table

    @cached_property
    def host_bytes(self) -> Table:
        """What every segment keeps in its host's memory: equations (O4) and (O7)."""
        states = self._sums(lambda options: options[0].host_optimizer_bytes)
        for shared in self.costs.shared:
            states = (
                states
                - np.maximum(self._users(shared.layers) - 1, 0)
                * shared.host_optimizer_bytes
            )
        table: Table = states + self._units * self._sums(
            lambda options: options[0].host_activation_bytes
        )
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
        others = self._largest(
            lambda options: options[0].temporary_bytes if len(options) == 1 else 0
        )
        for threshold in self._thresholds():
            allowed = [
                [
                    cost
                    for cost in options
                    if len(options) == 1 or cost.temporary_bytes <= threshold
                ]
                for options in self.kinds.options
            ]
            least = [
                min((cost.activation_bytes for cost in fit), default=-1)
                for fit in allowed
            ]
            prefix = self.kinds.sums([max(0, value) for value in least])
            missing = self.kinds.sums([value < 0 for value in least])
            held = self._units * (prefix[self.stops] - prefix[self.starts])
            total = self.fixed_bytes + held + np.maximum(others, threshold)
            possible = missing[self.stops] == missing[self.starts]
            best = np.minimum(best, np.where(possible, total, most))
        return best

    def _thresholds(self) -> list[int]:
        """Temporaries of layers that can recompute; 0 stands for segments without such layers."""
        return sorted(
            {0}
            | {cost.temporary_bytes for options in self.choosers for cost in options}
        )

    @cached_property
    def fits(self) -> Mask:
        """Segments that exist and have a recompute choice within the capacity, of device and host."""
        leanest = self._sums(
            lambda options: min(cost.activation_bytes for cost in options)
        )
        held = self.fixed_bytes + self._units * leanest
        surely = self.is_segment & (
            held + self._largest(_temporary_of_leanest) <= self.room_bytes
        )
        maybe = (
            self.is_segment
            & ~surely
            & (held + self._largest(_least_temporary) <= self.room_bytes)
        )
        if maybe.any():
            surely |= maybe & (self.least_bytes <= self.room_bytes)
        return (
            surely
            if self.host_room_bytes is None
            else surely & (self.host_bytes <= self.host_room_bytes)
        )

    @cached_property
    def choosers(self) -> tuple[LayerModes, ...]:
        """Distinct layers with a recompute choice."""
        return tuple(
            dict.fromkeys(options for options in self.kinds.options if len(options) > 1)
        )

    @cached_property
    def backward(self) -> Table:
        """Least B of every segment that fits its memory; a lower bound where `is_exact` is false: equation (G2)."""
        return self._with_recompute[0] + self.costs.waiting_ticks

    @cached_property
    def is_exact(self) -> Mask:
        """Segments whose `backward` is reached by a recompute choice that fits."""
        return self._with_recompute[1]

    @cached_property
    def _with_recompute(self) -> tuple[Table, Mask]:
        cheapest = self._sums(
            lambda options: min(cost.backward_ticks for cost in options)
        )
        room = self.room_bytes
        plain = self.fixed_bytes + self._units * self._sums(
            lambda options: options[0].activation_bytes
        )
        missing = (
            plain + self._largest(lambda options: options[0].temporary_bytes) - room
        )
        if len(self.choosers) == 1:
            return self._one_kind(), np.ones(missing.shape, bool)
        none_is_cheapest = all(
            options[0].backward_ticks == _cheapest(options) for options in self.choosers
        )
        return cheapest + self._relieved(), (missing <= 0) & none_is_cheapest

    def _relieved(self) -> Table:
        """Ticks that recomputation adds to every segment, at least: equation (G6)."""
        kept = self._sums(
            lambda options: min(
                (cost.backward_ticks, cost.activation_bytes) for cost in options
            )[1]
        )
        missing = (
            self.fixed_bytes
            + self._units * kept
            + self._largest(_least_temporary)
            - self.room_bytes
        )
        extra = np.zeros(missing.shape, dtype=np.int64)
        short = np.nonzero(self.is_segment & (missing > 0))
        if self.choosers and len(short[0]):
            starts, stops = (
                np.broadcast_to(each, missing.shape)[short]
                for each in (self.starts, self.stops)
            )
            needed = (missing / self._units)[short]
            extra[short] = Relief.of(self.kinds.options, self.kinds.places).least_ticks(
                starts, stops, needed
            )
        return extra

    def _one_kind(self) -> Table:
        """Only one kind of layer can recompute: least B by how many of them a segment holds, equation (G5)."""
        (options,) = self.choosers
        rest = self._sums(lambda each: each[0].backward_ticks if len(each) == 1 else 0)
        best = np.full(rest.shape, _IMPOSSIBLE)
        amounts = self._amount[self.is_segment]
        present = tuple(np.flatnonzero(np.bincount(amounts)).tolist())
        for limit in sorted({cost.temporary_bytes for cost in options}):
            allowed = tuple(cost for cost in options if cost.temporary_bytes <= limit)
            found = _mixes(_keeping(allowed), present).least_ticks(
                amounts, self._bytes_left[limit][self.is_segment]
            )
            best[self.is_segment] = np.minimum(best[self.is_segment], found)
        # What fits in no mode is no segment of any stage map (`fits`): any bound will do there.
        cheapest = self._amount * min(cost.backward_ticks for cost in options)
        return rest + np.where(best < _IMPOSSIBLE, best, cheapest)

    @cached_property
    def _amount(self) -> Table:
        """Layers of a segment that can recompute."""
        return self._sums(lambda options: int(len(options) > 1))

    @cached_property
    def _bytes_left(self) -> dict[int, Table]:
        """What one micro-batch may keep of the layers that can recompute, by the bytes of their temporaries."""
        (options,) = self.choosers
        return {
            limit: self._left(limit)
            for limit in sorted({cost.temporary_bytes for cost in options})
        }

    def _left(self, limit: int) -> Table:
        others = self._largest(
            lambda options: options[0].temporary_bytes if len(options) == 1 else 0
        )
        temporary = np.maximum(others, np.where(self._amount > 0, limit, 0))
        kept = self._sums(
            lambda options: options[0].activation_bytes if len(options) == 1 else 0
        )
        table: Table = (
            self.room_bytes - self.fixed_bytes - temporary - self._units * kept
        ) // self._units
        return table

    def layers(self, stage: int, x: int, y: int) -> range:
        """Layer indices of a segment."""
        return range(self.windows.least[stage] + x, self.windows.least[stage + 1] + y)

    def uniform_modes(
        self, stage: int, x: int, y: int
    ) -> tuple[tuple[int, RecomputeMode], ...] | None:
        """The modes behind `backward` where it is exact, most recomputation first; None otherwise."""
        if not self.is_exact[stage, x, y]:
            return None
        layers = self.layers(stage, x, y)
        if len(self.choosers) != 1:
            return tuple((layer, self.modes[layer][0].mode) for layer in layers)
        modes = iter(self._mixed(stage, x, y))
        return tuple(
            (
                layer,
                next(modes)
                if len(self.modes[layer]) > 1
                else self.modes[layer][0].mode,
            )
            for layer in layers
        )

    def _mixed(self, stage: int, x: int, y: int) -> list[RecomputeMode]:
        """Modes of the layers of a segment that can recompute, one kind of them."""
        (options,) = self.choosers
        amount = int(self._amount[stage, x, y])
        found: list[tuple[int, list[RecomputeMode]]] = []
        for limit in sorted({cost.temporary_bytes for cost in options}):
            allowed = tuple(cost for cost in options if cost.temporary_bytes <= limit)
            found += _mix(_keeping(allowed), amount).modes(
                int(self._bytes_left[limit][stage, x, y]), allowed
            )
        if not found:
            return [min(options, key=lambda cost: cost.activation_bytes).mode] * amount
        return min(found, key=lambda each: each[0])[1]


_IMPOSSIBLE = np.int64(2**62)


def _keeping(allowed: LayerModes) -> tuple[tuple[int, int], ...]:
    """(bytes kept, backward ticks) of every mode: all that a mix depends on."""
    return tuple((cost.activation_bytes, cost.backward_ticks) for cost in allowed)


@dataclass(frozen=True, slots=True)
class _Mix:
    """The ways worth taking to share modes out over layers that cost the same: each keeps more and takes less."""

    counts: Table
    """Layers in every mode, [way, mode]."""
    kept_bytes: Table
    """By way, rising."""
    ticks: Table
    """By way, falling."""

    def modes(
        self, room_bytes: int, allowed: LayerModes
    ) -> list[tuple[int, list[RecomputeMode]]]:
        """Ticks and modes of the best way, most recomputation first; nothing when none fits."""
        last = int(np.searchsorted(self.kept_bytes, room_bytes, side="right")) - 1
        if last < 0:
            return []
        pairs = reversed(list(zip(allowed, self.counts[last], strict=True)))
        return [
            (
                int(self.ticks[last]),
                [cost.mode for cost, amount in pairs for _ in range(int(amount))],
            )
        ]


@dataclass(frozen=True, slots=True)
class _Mixes:
    """The mixes of several numbers of layers in one table, so that all segments are looked up at once."""

    place: Table
    """By number of layers: which of the mixes is theirs."""
    first: Table
    """By mix: where its ways begin."""
    keys: Table
    """By way: place x span + bytes kept; rising."""
    ticks: Table
    span: int
    """More than any way keeps."""

    def least_ticks(self, amounts: Table, room_bytes: Table) -> Table:
        """Of the ways to share modes out over so many layers that keep at most so many bytes."""
        place = self.place[amounts]
        last = (
            np.searchsorted(
                self.keys,
                place * self.span + np.clip(room_bytes, -1, self.span - 1),
                side="right",
            )
            - 1
        )
        table: Table = np.where(
            last >= self.first[place], self.ticks[last], _IMPOSSIBLE
        )
        return table


@lru_cache(maxsize=256)
def _mixes(allowed: tuple[tuple[int, int], ...], amounts: tuple[int, ...]) -> _Mixes:
    """Of these numbers of layers."""
    mixes = [_mix(allowed, amount) for amount in amounts]
    sizes, places = np.array([len(mix.ticks) for mix in mixes]), np.arange(len(mixes))
    place = np.zeros(max(amounts) + 1, dtype=np.int64)
    place[list(amounts)] = places
    span = 1 + max(int(mix.kept_bytes[-1]) for mix in mixes)
    keys = np.repeat(places, sizes) * span + np.concatenate(
        [mix.kept_bytes for mix in mixes]
    )
    return _Mixes(
        place,
        np.cumsum(sizes) - sizes,
        keys,
        np.concatenate([mix.ticks for mix in mixes]),
        span,
    )


@lru_cache(maxsize=16384)
def _mix(allowed: tuple[tuple[int, int], ...], amount: int) -> _Mix:
    """So many layers, each in one of the allowed modes; kept, since most layouts of a family ask for the same."""
    counts = compositions(amount, len(allowed))
    kept, ticks = (
        counts @ np.array(values, dtype=np.int64)
        for values in zip(*allowed, strict=True)
    )
    order = np.lexsort((ticks, kept))
    ticks = ticks[order]
    is_worth = np.concatenate([[True], ticks[1:] < np.minimum.accumulate(ticks)[:-1]])
    order = order[is_worth]
    return _Mix(counts[order], kept[order], ticks[is_worth])


@cache
def compositions(total: int, parts: int) -> Table:
    """All ways to write a whole number as a sum of so many, [way, part]."""
    if parts == 1:
        return np.array([[total]], dtype=np.int64)
    if parts == 2:
        first = np.arange(total + 1, dtype=np.int64)
        return np.column_stack([first, total - first])
    rests = [compositions(total - first, parts - 1) for first in range(total + 1)]
    firsts = np.repeat(np.arange(total + 1, dtype=np.int64), list(map(len, rests)))
    return np.column_stack([firsts, np.concatenate(rests)])


def _differences(prefix: Table, starts: Table, stops: Table) -> Table:
    """Sums over [start, stop) from running totals."""
    table: Table = prefix[stops] - prefix[starts]
    return table


def _cheapest(options: LayerModes) -> int:
    return min(cost.backward_ticks for cost in options)


def _least_temporary(options: LayerModes) -> int:
    return min(cost.temporary_bytes for cost in options)


def _temporary_of_leanest(options: LayerModes) -> int:
    return min((cost.activation_bytes, cost.temporary_bytes) for cost in options)[1]
