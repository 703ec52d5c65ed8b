"""Balanced cuts: the rule by which a schedule's row gets its layers per stage.

w(l, g) is the time of layer l on a device of kind g, W(g) the sum of w(l, g) over all
layers, and g(s) the device of the rank of stage s. On equal devices there is one g.

    (E1)  contiguous stages with the least sum over s of w(s, g)^2 / W(g), g = g(s). If
          layers could be cut, every stage would then take the same time. Of several
          such cuts the one whose later stages take longer: then the stages of one round
          are alike, and the first round, which fills the pipeline, is the shortest
    (E2)  a stage of the busiest rank gives one layer to another stage, and the stages
          between pass one on. This is repeated while the busiest rank becomes less busy,
          or stays as busy with a smaller sum of the ranks' squares
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

_LATER = 1e-9
"""By how much less a stage's square counts than that of the stage before it.

It decides between equal cuts, and is above the errors of rounding."""


def balanced_cut(
    work: tuple[int, ...], stage_ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the layers of every stage on equal devices.

    Args:
        work: time of every layer; only the proportions count.
        stage_ranks: pipeline rank of every stage.
    """
    return balanced_cut_among((work,), (0,) * (max(stage_ranks) + 1), stage_ranks)


def balanced_cut_among(
    works: tuple[tuple[int, ...], ...],
    devices: tuple[int, ...],
    stage_ranks: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the layers of every stage on devices that differ.

    Args:
        works: by kind of device, the time of every layer; only the proportions count.
        devices: kind of every pipeline rank's.
        stage_ranks: pipeline rank of every stage.
    """
    unit = math.gcd(*(each for work in works for each in work))
    if unit > 1:
        works = tuple(tuple(each // unit for each in work) for work in works)
    return _in_proportion(works, devices, stage_ranks)


@lru_cache(maxsize=4096)
def _in_proportion(
    works: tuple[tuple[int, ...], ...],
    devices: tuple[int, ...],
    stage_ranks: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the cut for work in the smallest whole numbers."""
    kinds = tuple(devices[rank] for rank in stage_ranks)
    table = np.array(works, dtype=np.int64)
    cuts = _cuts_of(works[0]) if len(works) == 1 else EvenCuts(table)
    of_stages = table[list(kinds)]
    moved = less_busy(of_stages, cuts.sizes(kinds), np.array(stage_ranks))
    return tuple(moved.tolist())


@lru_cache(maxsize=256)
def _cuts_of(work: tuple[int, ...]) -> EvenCuts:
    """Return the cuts on equal devices; one into more stages continues a known one."""
    return EvenCuts(np.array([work], dtype=np.int64))


class EvenCuts:
    """The most even contiguous cuts of some layers: equation (E1).

    Dynamic programming over the stages. What is known of the first stages is kept for
    further cuts that begin on the same devices.
    """

    def __init__(self, works: Numbers) -> None:
        """Prepare the cuts of the same layers.

        Args:
            works: time of every layer, [device, layer].
        """
        totals = np.maximum(1, works.sum(axis=1))
        shares = works / totals[:, None]
        sums = np.zeros((len(works), works.shape[1] + 1))
        np.cumsum(shares, axis=1, out=sums[:, 1:])
        squares = np.square(sums[:, None, 1:] - sums[:, :-1, None])
        squares[:, *np.tril_indices(works.shape[1], -1)] = np.inf
        self._squares: Floats = squares * (totals / totals[0])[:, None, None]
        """Of a stage, [device, first layer, last layer]."""
        self._lock = threading.Lock()
        self._begin(())

    def sizes(self, kinds: tuple[int, ...]) -> Numbers:
        """Return the layers of every stage.

        Args:
            kinds: device of every stage; at most as many stages as layers.
        """
        with self._lock:
            return self._sizes(kinds)

    def _sizes(self, kinds: tuple[int, ...]) -> Numbers:
        """Return the same, with no other thread at work."""
        shared = min(len(kinds), len(self._kinds))
        if not shared or kinds[:shared] != self._kinds[:shared]:
            self._begin(kinds)
        for kind in kinds[len(self._kinds) :]:
            self._add_stage(kind)
        layers = self._squares.shape[1]
        edges = [layers]
        for first_layers in reversed(self._first_layers[: len(kinds)]):
            edges.append(int(first_layers[edges[-1] - 1]))
        return np.diff(np.array(edges[::-1]))

    def _begin(self, kinds: tuple[int, ...]) -> None:
        """Forget all stages but the first one."""
        layers = self._squares.shape[1]
        self._kinds = kinds[:1]
        self._least = self._squares[kinds[0]][0] if kinds else np.empty(0)
        """Least sum of the stages so far, by their last layer."""
        self._first_layers = [np.zeros(layers, dtype=np.intp)]
        """First layer of every stage so far, by its last layer."""

    def _add_stage(self, kind: int) -> None:
        """Add a stage; those before it have a layer each at least."""
        before = len(self._first_layers)
        own = self._squares[kind][before:, before:] * (1 - before * _LATER)
        cost = self._least[before - 1 : -1, None] + own
        none = np.zeros(before, dtype=np.intp)
        self._kinds = (*self._kinds, kind)
        self._first_layers.append(np.concatenate([none, before + cost.argmin(axis=0)]))
        self._least = np.concatenate([np.full(before, np.inf), cost.min(axis=0)])


def less_busy(
    of_stages: Numbers, sizes: Numbers, stage_ranks: NDArray[np.intp]
) -> Numbers:
    """Return a cut whose busiest rank is less busy, by moves of one layer: (E2).

    Args:
        of_stages: time of every layer on the stage's device, [stage, layer].
        sizes: layers of every stage.
        stage_ranks: pipeline rank of every stage.
    """
    owns = _owns(tuple(stage_ranks.tolist()))
    sizes = np.array(sizes)
    stages = np.arange(len(sizes))
    sums = np.zeros((len(sizes), of_stages.shape[1] + 1), dtype=np.int64)
    np.cumsum(of_stages, axis=1, out=sums[:, 1:])
    ends = np.cumsum(sizes)
    loads: Floats = (sums[stages, ends] - sums[stages, ends - sizes]) @ owns
    _, least = _least_busy(loads[None, :])
    for _ in range(of_stages.shape[1]):
        givers = np.flatnonzero((owns[:, loads.argmax()] > 0) & (sizes > 1))
        if not len(givers) or len(sizes) == 1:
            break
        others = loads + _changes(of_stages, sizes, owns, givers)
        place, score = _least_busy(others)
        if score >= least:
            break
        least, loads = score, others[place]
        giver, taker = divmod(place, len(sizes) - 1)
        sizes[givers[giver]] -= 1
        sizes[taker + (taker >= givers[giver])] += 1
    return sizes


def _changes(
    of_stages: Numbers, sizes: Numbers, owns: Floats, givers: NDArray[np.intp]
) -> Floats:
    """Return how the ranks' times change, [giver and other stage, rank].

    A giver gives a layer to the other stage, and every stage between passes one on: its
    last layer to the next stage, or its first one to the stage before.
    """
    stages = np.arange(len(sizes))
    ends = np.cumsum(sizes)
    starts = ends - sizes
    first = of_stages[stages, starts][:, None] * owns
    last = of_stages[stages, ends - 1][:, None] * owns
    before = of_stages[stages, starts - 1][:, None] * owns
    behind = of_stages[stages, ends % of_stages.shape[1]][:, None] * owns
    onwards = np.cumsum(before - last, axis=0)
    backwards = np.cumsum(behind - first, axis=0)
    taken = before + np.roll(onwards, 1, axis=0)
    to_later = taken[None] - (last + onwards)[givers, None]
    given = np.roll(backwards, 1, axis=0) - first
    to_earlier = (behind - backwards)[None] + given[givers, None]
    is_later = (stages > givers[:, None])[:, :, None]
    changes = np.where(is_later, to_later, to_earlier)
    pairs: Floats = changes[stages != givers[:, None]]
    return pairs


def _least_busy(loads: Floats) -> tuple[int, tuple[float, float]]:
    """Return the first row of least (busiest rank, sum of squares), and these.

    Args:
        loads: time of every rank, [row, rank].
    """
    busiest = loads.max(axis=1)
    rows = np.flatnonzero(busiest == busiest.min())
    squares = np.square(loads[rows]).sum(axis=1)
    place = int(squares.argmin())
    return int(rows[place]), (float(busiest.min()), float(squares[place]))


@lru_cache(maxsize=1024)
def _owns(stage_ranks: tuple[int, ...]) -> Floats:
    """Return whether a stage is a rank's, [stage, rank].

    Floats multiply faster, and hold whole numbers exactly below 2^53.
    """
    ranks = np.arange(max(stage_ranks) + 1)
    owns: Floats = (np.array(stage_ranks)[:, None] == ranks).astype(np.float64)
    return owns
