"""Which layers of a pipeline rank recompute: the fewest ticks that fit the memory, exactly.

Layers l of the rank's stages s, modes r; z(l,r) = 1 when layer l runs in mode r. At every moment t that may be its
peak, the rank holds n(t,s) micro-batches, or sequence chunks, of its stages; u(s) are the bytes of one of them, and
other(s) those of them that no mode changes:

    (R1)  sum over r of z(l,r) = 1                                                              -> _counted()
    (R2)  fixed + sum over s of n(t,s) u(s) + temp <= room, temp >= temp(l,r) z(l,r),
          chunks * u(s) >= other(s) + sum over l of s and r of act(l,r) z(l,r)                    -> _counted()
    (R3)  minimise sum of b(l,r) z(l,r)                                                         -> _counted()
    (R4)  of choices that take the same, the one whose lower stages keep less: sum of place(s) k(r) z(l,r) is least,
          with the place of the stage on the rank, and k of the mode among the layer's, most bytes first -> _counted()

Layers of a stage that cost the same are counted, not placed: z becomes a whole number of them, and CP-SAT chooses.

    (R5)  where only one kind of layer has a choice, and no moment holds less of a stage than of a higher one, no way to
          place numbers of layers in every mode keeps less than the leanest modes in the lowest stages, which is also
          that of (R4) (rearrangement inequality): so all numbers are looked at                   -> _of_one_kind()
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from planner.search.stage_maps.segments import LayerModes, compositions
from planner.spec.profile import RecomputeMode

Kind = tuple[tuple[int, int, int], ...]
"""What a layer may take: (activation bytes, backward ticks, temporary bytes) of every mode, from least recomputation to
most."""
_Numbers = NDArray[np.int64]
_Counts = tuple[tuple[tuple[int, ...], ...], ...]
"""Layers in every mode, by stage and kind."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the layers of one pipeline rank may take, and the room that they have."""

    stages: tuple[tuple[Kind, ...], ...]
    """Choices of every layer, by stage."""
    moments: tuple[tuple[int, ...], ...]
    """Units in flight of every stage, whenever the rank may hold most (`planner.schedule.in_flight`)."""
    room_bytes: int
    """For units in flight and the largest temporary."""
    other_bytes: tuple[int, ...]
    """Of a micro-batch of every stage, besides what its layers save."""
    chunks: int = 1
    """Of a sequence; each unit is one."""


def cheapest_modes(
    layers: dict[int, LayerModes], in_flight: int, room_bytes: int
) -> tuple[int, tuple[tuple[int, RecomputeMode], ...]] | None:
    """Backward ticks and the mode of every layer of a stage; None when no choice fits.

    Args:
        layers: choices by layer index, in order.
        in_flight: micro-batches whose activations are held at once.
        room_bytes: for activations and temporaries.
    """
    kinds = tuple(map(kind_of, layers.values()))
    found = fewest_ticks(Held((kinds,), ((in_flight,),), room_bytes, other_bytes=(0,)))
    if found is None:
        return None
    ticks, (chosen,) = found
    return ticks, tuple(
        (layer, layers[layer][index].mode)
        for layer, index in zip(layers, chosen, strict=True)
    )


def kind_of(options: LayerModes) -> Kind:
    """What a layer's choices take."""
    return tuple(
        (cost.activation_bytes, cost.backward_ticks, cost.temporary_bytes)
        for cost in options
    )


def fewest_ticks(held: Held) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
    """Backward ticks of a micro-batch, and which of its choices every layer takes, by stage: equations (R1) to (R4);
    None when none fits. Of the layers of a stage that cost the same, the first recompute most."""
    counted = tuple(tuple(Counter(kinds).items()) for kinds in held.stages)
    choosers = {kind for kinds in held.stages for kind in kinds if len(kind) > 1}
    if _is_sorted(held, choosers):
        found = _of_one_kind(held, *choosers)
    else:
        found = _counted(
            counted, held.moments, held.room_bytes, held.other_bytes, held.chunks
        )
    if found is None:
        return None
    ticks, counts = found
    return ticks, tuple(
        _placed(kinds, amounts)
        for kinds, amounts in zip(held.stages, counts, strict=True)
    )


def _is_sorted(held: Held, choosers: Collection[Kind]) -> bool:
    """Does (R5) hold?"""
    falls = all(
        before >= behind
        for moment in held.moments
        for before, behind in pairwise(moment)
    )
    return len(choosers) == 1 and held.chunks == 1 and falls


@lru_cache(maxsize=4096)
def _by_bytes(kind: Kind) -> tuple[int, ...]:
    """Its modes, those that keep most first."""
    return tuple(sorted(range(len(kind)), key=lambda mode: (-kind[mode][0], mode)))


def _of_one_kind(held: Held, chooser: Kind) -> tuple[int, _Counts] | None:
    """As `_counted`, by equation (R5)."""
    amounts = [kinds.count(chooser) for kinds in held.stages]
    others = [[kind[0] for kind in kinds if kind != chooser] for kinds in held.stages]
    ways = _ways(chooser, sum(amounts))
    places = np.repeat(np.arange(len(amounts)), amounts)
    fixed = [
        own + sum(mode[0] for mode in each)
        for own, each in zip(held.other_bytes, others, strict=True)
    ]
    moments = np.array(held.moments, dtype=np.int64)
    before = np.zeros((len(moments), len(places) + 1), dtype=np.int64)
    np.cumsum(moments[:, places], axis=1, out=before[:, 1:])
    kept = ((before[:, ways.stops] - before[:, ways.starts]) @ ways.activation_bytes).T
    kept += moments @ np.array(fixed, dtype=np.int64)
    largest = np.maximum(
        ways.temporary_bytes,
        max((mode[2] for each in others for mode in each), default=0),
    )
    fitting = np.flatnonzero(kept.max(axis=1) + largest <= held.room_bytes)
    if not len(fitting):
        return None
    ticks = ways.ticks[fitting]
    least = fitting[ticks == ticks.min()]
    heights = np.concatenate([[0], places.cumsum()])
    lower = (heights[ways.stops[least]] - heights[ways.starts[least]]) @ np.arange(
        len(chooser)
    )
    modes = ways.modes(int(least[lower.argmin()]))
    every = [
        np.bincount(modes[places == stage], minlength=len(chooser))
        for stage in range(len(amounts))
    ]
    rest = sum(mode[1] for each in others for mode in each)
    return int(ticks.min()) + rest, tuple(
        tuple(
            tuple(of_stage.tolist()) if kind == chooser else (kinds.count(kind),)
            for kind in dict.fromkeys(kinds)
        )
        for kinds, of_stage in zip(held.stages, every, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Ways:
    """All ways to share out modes over layers that cost the same; the layers in a mode follow those in leaner ones."""

    order: _Numbers
    """The modes, those that keep most first; in this order stand the columns of the next four."""
    counts: _Numbers
    """Layers in every mode, [way, mode]."""
    starts: _Numbers
    """The first of them, [way, mode]."""
    stops: _Numbers
    """The layer behind them, [way, mode]."""
    activation_bytes: _Numbers
    """By mode."""
    temporary_bytes: _Numbers
    """The largest, by way."""
    ticks: _Numbers
    """Backward, by way."""

    def modes(self, way: int) -> _Numbers:
        """Of every layer."""
        return np.repeat(self.order[::-1], self.counts[way][::-1])


@lru_cache(maxsize=1024)
def _ways(kind: Kind, amount: int) -> _Ways:
    """Of so many layers; kept, since the ranks of a layout have about as many."""
    counts, order = compositions(amount, len(kind)), np.array(_by_bytes(kind))
    stops = counts[:, ::-1].cumsum(axis=1)[:, ::-1]
    activation, backward, temporary = np.array(kind, dtype=np.int64)[order].T
    largest = np.where(counts > 0, temporary, 0).max(axis=1)
    return _Ways(
        order, counts, stops - counts, stops, activation, largest, counts @ backward
    )


def _placed(kinds: Sequence[Kind], amounts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The choice of every layer of a stage, most recomputation first."""
    left = dict(zip(dict.fromkeys(kinds), map(list, amounts), strict=True))
    chosen = []
    for kind in kinds:
        index = max(index for index, amount in enumerate(left[kind]) if amount)
        left[kind][index] -= 1
        chosen.append(index)
    return tuple(chosen)


@lru_cache(maxsize=16384)
def _counted(
    stages: tuple[tuple[tuple[Kind, int], ...], ...],
    moments: tuple[tuple[int, ...], ...],
    room_bytes: int,
    other_bytes: tuple[int, ...],
    chunks: int,
) -> tuple[int, _Counts] | None:
    """Backward ticks, and of every stage and kind how many layers run in each mode; None when no choice fits.

    Kept: a search asks for the same stage again and again.
    """
    model = cp_model.CpModel()
    modes = [mode for kinds in stages for kind, _ in kinds for mode in kind]
    temporary = model.new_int_var(0, max(mode[2] for mode in modes), "temporary")
    counts: list[list[list[cp_model.IntVar]]] = []
    ticks: list[cp_model.LinearExprT] = []
    lower: list[cp_model.LinearExprT] = []
    units: list[cp_model.LinearExpr | cp_model.IntVar] = []
    for place, kinds in enumerate(stages):
        saved: list[cp_model.LinearExprT] = [other_bytes[place]]
        counts.append([])
        for kind, amount in kinds:
            counts[-1].append([model.new_int_var(0, amount, "") for _ in kind])
            model.add(sum(counts[-1][-1]) == amount)
            places = np.argsort(_by_bytes(kind)).tolist()
            for index, mode, count in zip(places, kind, counts[-1][-1], strict=True):
                is_used = model.new_bool_var("")
                model.add(count <= amount * is_used)
                model.add(temporary >= mode[2] * is_used)
                saved.append(mode[0] * count)
                ticks.append(mode[1] * count)
                lower.append(place * index * count)
        whole = cp_model.LinearExpr.sum(saved)
        units.append(
            whole if chunks == 1 else _rounded_up(model, whole, chunks, room_bytes)
        )
    for held in moments:
        taken = [
            temporary,
            *(number * unit for number, unit in zip(held, units, strict=True)),
        ]
        model.add(cp_model.LinearExpr.sum(taken) <= room_bytes)
    weight = 1 + sum(
        place * len(kind) * amount
        for place, kinds in enumerate(stages)
        for kind, amount in kinds
    )
    model.minimize(
        weight * cp_model.LinearExpr.sum(ticks) + cp_model.LinearExpr.sum(lower)
    )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # Ctrl-C is the caller's
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    found = tuple(
        tuple(tuple(int(solver.value(one)) for one in each) for each in stage)
        for stage in counts
    )
    return round(solver.objective_value) // weight, found


def _rounded_up(
    model: cp_model.CpModel, saved: cp_model.LinearExprT, chunks: int, most: int
) -> cp_model.IntVar:
    """A chunk's share of so many bytes."""
    unit = model.new_int_var(0, max(0, most), "")
    model.add(chunks * unit >= saved)
    return unit
