"""The rule by which layers are dealt to stages: most even contiguous stages, then single moves.

With w(l, g) the ticks of layer l and one micro-batch on a device g, g(s) that of the rank of stage s, and W(g) the sum
of w(l, g) over all layers; on equal devices there is one g:

    (E1)  start from the contiguous stages with the least sum over s of w(s, g)^2 / W(g), g = g(s): if layers could be
          cut, every stage would then take the same time; of several such partitions from the one whose later stages
          take more: then the ranks' stages of one round are alike, and the first round, which fills the pipeline, is
          the shortest                                                                                 -> even_sizes()
    (E2)  as long as it makes the busiest rank less busy (or, at a tie, the sum of the ranks' squares smaller): take a
          layer from one of its stages and give it to another stage, those between moving up by one; a layer lasts as
          it does where it then stands                                                                 -> balanced()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

_LATER = 1e-9
"""By how much less a stage's square counts than that of the stage before: to choose among equals, above rounding."""


def deal(work: tuple[int, ...], stage_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of every stage by (E1) and (E2) on equal devices; only the proportions of the work count.

    Args:
        work: of every layer.
        stage_ranks: pipeline rank of every stage.
    """
    return deal_among((work,), (0,) * (max(stage_ranks) + 1), stage_ranks)


def deal_among(
    works: tuple[tuple[int, ...], ...],
    devices: tuple[int, ...],
    stage_ranks: tuple[int, ...],
) -> tuple[int, ...]:
    """Layers of every stage by (E1) and (E2) on devices that differ; only the proportions of the work count.

    Args:
        works: by kind of device, of every layer.
        devices: kind of every pipeline rank's.
        stage_ranks: pipeline rank of every stage.
    """
    unit = math.gcd(*(each for work in works for each in work))
    if unit > 1:
        works = tuple(tuple(each // unit for each in work) for work in works)
    return dealt_in_proportion(works, devices, stage_ranks)


@lru_cache(maxsize=4096)
def dealt_in_proportion(
    works: tuple[tuple[int, ...], ...],
    devices: tuple[int, ...],
    stage_ranks: tuple[int, ...],
) -> tuple[int, ...]:
    """`deal_among` of work in the smallest whole numbers."""
    kinds = tuple(devices[rank] for rank in stage_ranks)
    table = np.array(works, dtype=np.int64)
    even = (_evens(works[0]) if len(works) == 1 else _Evens(table)).sizes(kinds)
    own = table[list(kinds)]
    return tuple(balanced(own, even, np.array(stage_ranks)).tolist())


@lru_cache(maxsize=256)
def _evens(work: tuple[int, ...]) -> _Evens:
    """On equal devices, where fewer stages are a part of more."""
    return _Evens(np.array([work], dtype=np.int64))


def even_sizes(works: Numbers, kinds: Sequence[int]) -> Numbers:
    """Layers of every stage of the most even contiguous partition: equation (E1).

    Args:
        works: by kind of device, of every layer.
        kinds: device of every stage; at most as many stages as layers.
    """
    return _Evens(works).sizes(tuple(kinds))


class _Evens:
    """The most even contiguous partitions of some layers: (E1) by dynamic programming over the stages, of which the
    first ones are known from partitions that begin on the same devices."""

    def __init__(self, works: Numbers) -> None:
        sums = np.maximum(1, works.sum(axis=1))
        parts = works / sums[:, None]
        totals = np.concatenate(
            [np.zeros((len(works), 1)), np.cumsum(parts, axis=1)], axis=1
        )
        squares = np.square(
            totals[:, None, 1:] - totals[:, :-1, None]
        )  # [device, first layer, last layer]
        squares[:, *np.tril_indices(works.shape[1], -1)] = np.inf
        self._squares = squares * (sums / sums[0])[:, None, None]
        self._begin(())

    def _begin(self, kinds: tuple[int, ...]) -> None:
        self._kinds = kinds[:1]
        self._least = (
            self._squares[kinds[0]][0] if kinds else np.empty(0)
        )  # of these stages, by the last layer
        self._came = [
            np.zeros(self._squares.shape[1], dtype=np.intp)
        ]  # first layer of the last stage

    def sizes(self, kinds: tuple[int, ...]) -> Numbers:
        """Layers of every stage, each on a device of one kind."""
        shared = min(len(kinds), len(self._kinds))
        if not shared or kinds[:shared] != self._kinds[:shared]:
            self._begin(kinds)
        for kind in kinds[len(self._kinds) :]:
            self._add_stage(kind)
        layers = self._squares.shape[1]
        starts, stop = [], layers
        for came in reversed(self._came[: len(kinds)]):
            starts.append(int(came[stop - 1]))
            stop = starts[-1]
        return np.diff(np.array([*reversed(starts), layers]))

    def _add_stage(self, kind: int) -> None:
        """The stages before hold a layer each at least."""
        before = len(self._came)
        cost = self._least[before - 1 : -1, None] + self._squares[kind][
            before:, before:
        ] * (1 - before * _LATER)
        came = np.concatenate(
            [np.zeros(before, dtype=np.intp), before + cost.argmin(axis=0)]
        )
        self._kinds = (*self._kinds, kind)
        self._came.append(came)
        self._least = np.concatenate([np.full(before, np.inf), cost.min(axis=0)])


def balanced(own: Numbers, sizes: Numbers, stage_ranks: NDArray[np.intp]) -> Numbers:
    """Sizes whose busiest rank is less busy, moving one layer at a time: equation (E2).

    Args:
        own: [stage, layer], ticks of every layer on the stage's device.
        sizes: layers of every stage.
        stage_ranks: pipeline rank of every stage.
    """
    _, holds = holders(tuple(stage_ranks.tolist()))
    sizes, stages = np.array(sizes), np.arange(len(sizes))
    sums = np.concatenate(
        [np.zeros((len(sizes), 1), dtype=np.int64), np.cumsum(own, axis=1)], axis=1
    )
    stops = np.cumsum(sizes)
    loads = (sums[stages, stops] - sums[stages, stops - sizes]) @ holds
    best = _best_of(loads[None, :])[1]
    for _ in range(own.shape[1]):
        givers = np.flatnonzero((holds[:, loads.argmax()] > 0) & (sizes > 1))
        others = loads + _changes(own, sizes, holds, givers)
        if not len(others):
            break
        place, score = _best_of(others)
        if score >= best:
            break
        best, loads = score, others[place]
        giver, taker = divmod(place, len(sizes) - 1)
        sizes[givers[giver]] -= 1
        sizes[taker + (taker >= givers[giver])] += 1
    return sizes


def _changes(
    own: Numbers, sizes: Numbers, holds: NDArray[np.float64], givers: NDArray[np.intp]
) -> NDArray[np.float64]:
    """What the ranks' loads change by when one of these stages gives a layer to another stage, every pair of them.

    Every stage between passes a layer on: to the next its last, or to the one before its first.
    """
    stages, stops = np.arange(len(sizes)), np.cumsum(sizes)
    starts = stops - sizes
    first, last = own[stages, starts], own[stages, stops - 1]
    before, behind = own[stages, starts - 1], own[stages, stops % own.shape[1]]
    onwards = np.cumsum((before - last)[:, None] * holds, axis=0)
    backwards = np.cumsum((behind - first)[:, None] * holds, axis=0)
    to_later = (before[:, None] * holds + np.roll(onwards, 1, axis=0))[None] - (
        last[givers, None] * holds[givers] + onwards[givers]
    )[:, None]
    to_earlier = (behind[:, None] * holds - backwards)[None] + (
        np.roll(backwards, 1, axis=0)[givers] - first[givers, None] * holds[givers]
    )[:, None]
    changes = np.where((stages > givers[:, None])[:, :, None], to_later, to_earlier)
    pairs: NDArray[np.float64] = changes[stages != givers[:, None]]
    return pairs


def _best_of(loads: NDArray[np.float64]) -> tuple[int, tuple[float, float]]:
    """The first of the rows whose (busiest rank, sum of squares) is least, and these."""
    busiest = loads.max(axis=1)
    rows = np.flatnonzero(busiest == busiest.min())
    squares = np.square(loads[rows]).sum(axis=1)
    place = int(squares.argmin())
    return int(rows[place]), (float(busiest.min()), float(squares[place]))


@lru_cache(maxsize=1024)
def holders(ranks: tuple[int, ...]) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Lowest stage of every rank, and whether a stage is a rank's, [stage, rank]."""
    every = np.arange(max(ranks) + 1)
    # Floats multiply faster, and hold whole ticks exactly as long as they are below 2^53.
    holds = (np.array(ranks)[:, None] == every[None, :]).astype(np.float64)
    return holds.argmax(axis=0), holds
