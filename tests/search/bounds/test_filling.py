"""The bound by greedy filling, against every cut of small columns, simulated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import RECEIVE_BUFFERS
from planner.schedule import Durations, build, simulate
from planner.search.bounds.filling import Filling
from planner.search.bounds.spread import RankLoad, Spread

_LAYERS, _MODES = 5, 2
_NO_LIMIT = 2**53


@dataclass(frozen=True)
class Column:
    """Pipeline ranks, each with the ticks and bytes of every layer by mode, and what goes on behind every layer."""

    schedule: str
    loads: tuple[RankLoad, ...]
    micro_batches: int
    transfers: tuple[tuple[int, ...], ...]

    @property
    def in_flight(self) -> list[int]:
        """Micro-batches that every rank holds at once."""
        ranks = range(len(self.loads), 0, -1)
        return [
            self.micro_batches
            if self.schedule == "gpipe"
            else min(self.micro_batches, behind)
            for behind in ranks
        ]

    @property
    def filling(self) -> Filling:
        """What is tested."""
        is_gpipe = self.schedule == "gpipe"
        return Filling.of(
            self.loads,
            self.micro_batches,
            self.in_flight,
            is_gpipe=is_gpipe,
            transfers=self.transfers,
        )

    def peak(self, rank: int, cut: tuple[int, ...], modes: tuple[int, ...]) -> float:
        """Bytes of a rank."""
        load, units = self.loads[rank], self.in_flight[rank]
        layers = range(cut[rank], cut[rank + 1])
        assert load.boundary_bytes is not None
        received = RECEIVE_BUFFERS * load.boundary_bytes[cut[rank] - 1] if rank else 0.0
        sent = RECEIVE_BUFFERS if rank < len(self.loads) - 1 else 0
        held = sum(
            load.ogp_bytes[each, 0] + units * load.activation_bytes[each, modes[each]]
            for each in layers
        )
        return float(
            held + (units + sent) * load.boundary_bytes[cut[rank + 1] - 1] + received
        )

    def ticks(self, cut: tuple[int, ...], modes: tuple[int, ...]) -> float:
        """Of a step."""
        stages = [
            [(each, modes[each]) for each in range(a, b)] for a, b in pairwise(cut)
        ]
        pairs = list(zip(self.loads, stages, strict=True))
        moved = tuple(
            each[last - 1] for each, last in zip(self.transfers, cut[1:-1], strict=True)
        )
        durations = Durations(
            forward=tuple(
                sum(load.forward[at] for at in stage) for load, stage in pairs
            ),
            backward_input=tuple(
                sum(load.backward[at] for at in stage) for load, stage in pairs
            ),
            backward_weight=(0.0,) * len(pairs),
            transfer_forward=moved,
            transfer_backward=moved,
        )
        schedule = build(
            self.schedule, ranks=len(pairs), micro_batches=self.micro_batches
        )
        ends = [row[-1] for row in simulate(schedule, durations).finish_seconds]
        tails = [
            sum(np.broadcast_to(load.tail, load.forward.shape)[at] for at in stage)
            for load, stage in pairs
        ]
        return float(max(end + tail for end, tail in zip(ends, tails, strict=True)))


@st.composite
def columns(draw: st.DrawFn) -> Column:
    """Up to four ranks of different speed; room from ample to too little."""
    dice = np.random.default_rng(draw(st.integers(0, 10**6)))
    ranks, shape = draw(st.integers(1, 4)), (_LAYERS, _MODES)
    forward = dice.integers(1, 10, (_LAYERS, 1)) * np.ones(shape)
    backward = np.cumsum(dice.integers(1, 12, shape), axis=1).astype(np.float64)
    ogp, activations = (
        dice.integers(0, 50, (_LAYERS, 1)) * np.ones(shape),
        dice.integers(0, 30, shape).astype(float),
    )
    tail, boundaries = (
        dice.integers(0, 20, (_LAYERS, 1)) * np.ones(shape),
        dice.integers(0, 9, _LAYERS).astype(float),
    )
    room = (
        draw(st.sampled_from((0.8, 1.2, 2.0, 5.0)))
        * (ogp.sum() + ranks * activations.sum())
        / 2
        / ranks
    )
    loads = tuple(
        RankLoad(
            forward=speed * forward,
            backward=speed * backward,
            ogp_bytes=ogp,
            activation_bytes=activations,
            room_bytes=int(room * dice.uniform(0.7, 1.3)),
            tail=tail,
            in_order=True,
            boundary_bytes=boundaries,
        )
        for speed in dice.choice((10.0, 17.0, 31.0), ranks)
    )
    transfers = tuple(
        tuple(dice.integers(0, 40, _LAYERS).tolist()) for _ in range(ranks - 1)
    )
    return Column(
        draw(st.sampled_from(("gpipe", "1f1b"))),
        loads,
        draw(st.sampled_from((1, 3, 9))),
        transfers,
    )


@settings(max_examples=60)
@given(columns())
def test_no_stage_map_that_fits_is_faster_than_the_bound(column: Column) -> None:
    """Of all cuts with all modes, simulated, the fastest that fits is no faster; it lies in the windows of its time."""
    found = []
    for inner in combinations(range(1, _LAYERS), len(column.loads) - 1):
        cut = (0, *inner, _LAYERS)
        for modes in product(range(_MODES), repeat=_LAYERS):
            if all(
                column.peak(p, cut, modes) <= load.room_bytes
                for p, load in enumerate(column.loads)
            ):
                found.append((column.ticks(cut, modes), cut))
    if not found:
        return
    ticks, cut = min(found)
    filling = column.filling
    assert filling.leaves(ticks)
    assert filling.bound(0, int(ticks) + 1) <= ticks
    assert filling.bound(0, _NO_LIMIT) <= ticks
    windows = filling.windows(ticks)
    assert windows is not None
    assert all(
        a <= b <= c for a, b, c in zip(windows.least, cut, windows.most, strict=True)
    )
    narrowed = filling.below(1.3 * ticks)
    assert narrowed is not None
    assert narrowed.leaves(ticks)
    assert narrowed.bound(0, int(1.3 * ticks)) <= ticks


@settings(max_examples=40)
@given(columns())
def test_gpipe_does_nothing_that_the_windows_of_1f1b_exclude(column: Column) -> None:
    """Without transfers, the fastest cut that fits all micro-batches lies in the windows of 1f1b for its time."""
    ranks = len(column.loads)
    gpipe = replace(column, schedule="gpipe", transfers=((0,) * _LAYERS,) * (ranks - 1))
    found = []
    for inner in combinations(range(1, _LAYERS), ranks - 1):
        cut = (0, *inner, _LAYERS)
        for modes in product(range(_MODES), repeat=_LAYERS):
            if all(
                gpipe.peak(p, cut, modes) <= load.room_bytes
                for p, load in enumerate(gpipe.loads)
            ):
                found.append((gpipe.ticks(cut, modes), cut))
    if found:
        ticks, cut = min(found)
        windows = replace(gpipe, schedule="1f1b").filling.windows(ticks)
        assert windows is not None
        assert all(
            a <= b <= c
            for a, b, c in zip(windows.least, cut, windows.most, strict=True)
        )


def test_what_is_asked_in_narrower_windows_is_told_as_well() -> None:
    """Six layers on two devices: the same bound, asked at once, or below a T that leaves fewer places to start at."""
    rank = _rank((1, 9, 2, 8, 3, 7), (1, 1, 1, 1, 1, 1), 10)
    column = Filling.of((rank, rank), 8, (2, 1))
    bound = column.bound(0, 10**9)
    narrowed = column.below(1.2 * bound)
    assert narrowed is not None
    assert narrowed.within != column.windows(10**9)
    assert narrowed.bound(0, int(1.2 * bound)) == pytest.approx(bound, rel=0.01)


def _rank(work: tuple[int, ...], held: tuple[int, ...], room: int) -> RankLoad:
    ticks, bytes_ = (
        np.array([work], dtype=np.float64).T,
        np.array([held], dtype=np.float64).T,
    )
    return RankLoad(ticks, 2 * ticks, bytes_, 0 * bytes_, room, in_order=True)


def test_layers_stay_in_their_order() -> None:
    """The first two layers fill a rank each. The linear bound puts a half of each and of the long ones on both ranks;
    in order, one rank has the three last layers, and 3 x 100 forward and twice that back for every micro-batch."""
    rank = _rank((1, 1, 100, 100, 100), (9, 9, 1, 1, 1), 12)
    column = Filling.of((rank, rank), 100, (2, 1), is_gpipe=False)
    assert column.bound(0, 10**9) == pytest.approx(100 * 3 * 300, rel=0.01)
    assert Spread.of((rank, rank), 100, (2, 1)).bound() < 0.6 * 100 * 3 * 300


def test_what_does_not_fit_in_order_has_no_windows() -> None:
    """Three layers of nine bytes on three devices, of which one has room for eight."""
    loads = [_rank((1, 1, 1), (9, 9, 9), room) for room in (9, 8, 9)]
    assert not Filling.of(loads, 4, (3, 2, 1), is_gpipe=False).leaves(_NO_LIMIT)


def test_a_rank_may_start_before_a_layer_that_does_not_fit_it() -> None:
    """The second rank has no room for the second layer, but for the third: greedy filling may offer it neither."""
    loads = [_rank((1, 1, 1, 1), (1, 8, 1, 1), room) for room in (10, 2, 10)]
    assert Filling.of(loads, 4, (3, 2, 1), is_gpipe=False).leaves(_NO_LIMIT)


def test_equal_layers_are_shared_out_evenly() -> None:
    """Four equal layers on two equal ranks: two each, and M + P - 1 = 9 times two layers of 1000 + 2000 ticks."""
    load = _rank((1000,) * 4, (1,) * 4, 10**6)
    column = Filling.of((load, load), 8, (8, 8), is_gpipe=True)
    assert column.bound(0, 10**6) == pytest.approx(9 * 2 * 3000, rel=0.01)
