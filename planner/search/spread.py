"""A lower bound where pipeline ranks differ: what a step takes if layers could be cut, and spread over ranks freely.

A column of alike data ranks has pipeline ranks p, each with room R(p), on which layer l in recompute mode r takes t
ticks forward and backward, holds o bytes of OGP and a bytes of activations per micro-batch. With M micro-batches,
u(p) = min(M, P - p), and x(p, l, r) the fraction of a layer that is on a rank in a mode, no stage map that fits beats

    (U1)  least T such that every layer is somewhere, sum over p, r of x = 1, and for every row i of `Rows`
          T >= C(i) + sum of (1 + B(i, p)) t x, and of the tails on rank 0, where the last gradient comes up    (S3)
          and for every rank R >= sum over l, r of (o + u a) x; under gpipe M a                            (M1), (M2)
    (U2)  any weights q(i) >= 0 of sum 1 and prices m(p) >= 0 of its bytes tell that (Lagrange)
          T >= q C + sum over l of the least over p, r of t (1 + q B) + m (o + u a), less sum of m R   -> Spread.dual()
    (U3)  the q and m for which (U2) tells most are the dual solution of (U1). They are approached from inside by
          Newton steps towards a falling barrier (primal-dual interior point method: Mehrotra 1992); whatever they are
          then, (U2) holds. Where many layers differ, they are told of a few bundles of them           -> Spread.bound()
    (U8)  the rows are (5c) of `planner.search.round_trips`, around one rank, around two neighbours, and around all from
          some rank on; where M <= u(p), rank p alone, (5a), and half of (5b)'s backwards                  -> Rows.of()

(5c) holds for gpipe as well, where all forwards come before the backwards, but there nobody pays for more than one
round of transfers. Temporaries count nothing. Layers that cost the same are one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_STEPS = 30
"""Newton steps at most; about fifteen are enough."""
_CLOSE = 4e-3
"""Relative gap at which the next step is not worth its time."""
_INSIDE = 0.9
"""Part of the way to the nearest face that a step goes."""
ROUNDING = 1e-9
"""Of floating-point sums, for bounds that must not be too high."""
_MOST_TICKS = 2.0**53
_FACTORS = (8.0, 64.0, 512.0, 4096.0)
_MOST_FIRST = 8
"""Ranks that rows start with; of more, some are left out, which weakens the bound."""
_MOST_KINDS = 16
"""Of layers, for which weights and prices are looked for; they are judged by all of them."""


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What kinds of layers take of one pipeline rank: all layers of a kind together, [kind, mode]."""

    forward: Floats
    """Ticks of a micro-batch."""
    backward: Floats
    ogp_bytes: Floats
    activation_bytes: Floats
    """Of a micro-batch."""
    room_bytes: int
    elements: Floats | None = None
    """Parameters; None: what they take per element is part of the ticks."""
    tail: Floats | float = 0.0
    """Ticks of a step, after its last action."""

    def with_exchanges(self, in_micro_batch: float, in_step: float) -> RankLoad:
        """With so many ticks more per element."""
        assert self.elements is not None, "elements are known as long as nothing is priced"
        forward = self.forward + in_micro_batch * self.elements
        return replace(self, forward=forward, tail=in_step * self.elements)


@dataclass(frozen=True)
class Rows:
    """What the time of a step is no less than, besides one micro-batch on all ranks: equation (U8)."""

    fixed: Floats
    """C, ticks of transfers, [row]."""
    again: Floats
    """B, further micro-batches, [row, rank]."""

    @classmethod
    def of(cls, ranks: int, micro_batches: int, moved: Moved | None = None) -> Self:
        """Of a column.

        Args:
            ranks: P.
            micro_batches: M.
            moved: under 1f1b, ticks of one transfer behind each of these ranks together, at least; None: transfers
                count nothing.
        """
        step = -(-ranks // _MOST_FIRST)
        starts = sorted({*range(0, ranks, step), ranks - 1})
        found = [each for first in starts for each in _rows_of(first, ranks, micro_batches, moved or _nothing)]
        return cls(np.array([fixed for fixed, _ in found]), np.stack([again for _, again in found]))


Moved = Callable[[range], float]


def _nothing(ranks: range) -> float:
    return 0.0


def _rows_of(first: int, ranks: int, count: int, moved: Moved) -> Iterator[tuple[float, Floats]]:
    """The rows of a rank."""
    units, place, last = ranks - first, np.arange(ranks), ranks - 1
    if count <= units:
        yield 2 * moved(range(last)), (count - 1) / 2 * (place == first)
        yield 2 * moved(range(first)), (count - 1) * (place == first) - 1.0 * (place > first)
        return
    for around in sorted({1, 2, units}):
        if around <= units:
            turns, left = divmod(count - 1 - units, around)
            again = turns * ((place >= first) & (place < first + around)) + (place >= first) + left * (place == first)
            whole = moved(range(last)) + moved(range(first, last))
            yield 2 * (whole + turns * moved(range(first, first + around - 1))), again.astype(np.float64)


@dataclass(frozen=True)
class Spread:
    """The linear programme (U1) of one column, with ticks and bytes scaled to about 1."""

    once: Floats
    """t, [rank, kind, mode], with the tails on rank 0."""
    work: Floats
    """t."""
    held: Floats
    """(o + u a) / R."""
    rows: Rows
    ticks: float
    """That the scaled 1 stands for."""

    @classmethod
    def of(cls, ranks: Sequence[RankLoad], rows: Rows, in_flight: Sequence[int]) -> Self:
        """A column.

        Args:
            ranks: its pipeline ranks, in order.
            rows: of as many ranks.
            in_flight: how many micro-batches every rank holds at once, at least.
        """
        work = np.stack([each.forward + each.backward for each in ranks])
        once = work.copy()
        once[0] += ranks[0].tail
        bytes_ = np.stack(
            [load.ogp_bytes + units * load.activation_bytes for load, units in zip(ranks, in_flight, strict=True)]
        )
        held = bytes_ / np.array([max(1, each.room_bytes) for each in ranks])[:, None, None]
        even = rows.again.mean(axis=0)[:, None, None] * work
        scale = max(1.0, float((once + even).mean(axis=(0, 2)).sum()))
        return cls(once / scale, work / scale, held, replace(rows, fixed=rows.fixed / scale), scale)

    def dual(self, weights: Floats, prices: Floats) -> float:
        """Scaled ticks by (U2).

        Args:
            weights: q, of sum 1.
            prices: m R, not negative.
        """
        again = weights @ self.rows.again
        reduced = self.once + again[:, None, None] * self.work + prices[:, None, None] * self.held
        return float(reduced.min(axis=(0, 2)).sum() - prices.sum() + weights @ self.rows.fixed)

    def told(self, rows: Floats) -> int:
        """Ticks by (U2), by weights and prices in one row."""
        count = len(self.rows.fixed)
        return self._in_ticks(self.dual(rows[:count], rows[count:]))

    def _in_ticks(self, scaled: float) -> int:
        return max(0, int(min(_MOST_TICKS, scaled * self.ticks * (1 - ROUNDING))))

    def bound(self, enough_ticks: float = _MOST_TICKS) -> int:
        """Ticks by (U3); what is at least `enough_ticks` need not be told more exactly."""
        return self.bound_and_rows(enough_ticks)[0]

    def bound_and_rows(self, enough_ticks: float, known: Floats | None = None) -> tuple[int, Floats]:
        """Ticks by (U3), and the weights and prices that tell most.

        Args:
            enough_ticks: that need not be told more exactly.
            known: weights and prices of a similar column, which may tell enough at once.
        """
        count, coarse = len(self.rows.fixed), self.bundled()
        rows = np.concatenate([np.full(count, 1 / count), np.full(len(self.once), 1 / len(self.once))])
        rows = max((rows if known is None else known, *_dear(rows, count)), key=self.told)
        best, point, reached = self.dual(rows[:count], rows[count:]), _Point.first(coarse), 0.0
        with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError):  # where nothing fits, the prices have no limit
            for _ in range(_STEPS):
                is_close = point.misses < _CLOSE and point.step - reached <= _CLOSE * reached
                if best * self.ticks >= enough_ticks or is_close:
                    break
                point = point.moved(coarse)
                tried = point.dual_rows / point.dual_rows[:count].sum()
                reached = max(reached, coarse.dual(tried[:count], tried[count:]))
                told = self.dual(tried[:count], tried[count:])
                best, rows = (told, tried) if told > best else (best, rows)
        return self._in_ticks(best), rows

    def bundled(self) -> Spread:
        """A few bundles of kinds that take like much time for their bytes; itself, where there are few kinds."""
        kinds = self.once.shape[1]
        if kinds <= _MOST_KINDS:
            return self
        order = np.argsort((self.held / np.maximum(1e-12, self.work)).mean(axis=(0, 2)), kind="stable")
        starts = np.linspace(0, kinds, _MOST_KINDS, endpoint=False).astype(np.intp)
        once, work, held = (
            np.add.reduceat(each[:, order], starts, axis=1) for each in (self.once, self.work, self.held)
        )
        return replace(self, once=once, work=work, held=held)

    @cached_property
    def squares(self) -> tuple[Floats, ...]:
        """Products of the rows' coefficients."""
        once, work, held = self.once, self.work, self.held
        return once * once, once * work, work * work, once * held, work * held, held * held


def _dear(rows: Floats, count: int) -> Iterator[Floats]:
    """The same weights with higher and higher prices: where nothing fits, these tell it at once."""
    for factor in _FACTORS:
        yield np.concatenate([rows[:count], factor * rows[count:]])


@dataclass(frozen=True)
class _Point:
    """Primal and dual values inside: x, T and slacks s >= 0; rows y = (q, m) and layers v; z = what a part costs less
    its share of v."""

    parts: Floats
    """x."""
    step: float
    """T."""
    slacks: Floats
    """Of the rows: of time, then of bytes."""
    dual_rows: Floats
    """Their multipliers, which are the slacks' duals, too."""
    dual_layers: Floats
    dual_parts: Floats
    dual_step: float
    misses: float = np.inf
    """By how much the equations are missed."""

    @classmethod
    def first(cls, spread: Spread) -> Self:
        """Every layer everywhere, in equal parts."""
        (ranks, kinds, modes), count = spread.once.shape, len(spread.rows.fixed)
        parts = np.full(spread.once.shape, 1 / (ranks * modes))
        rows = _rows(spread, parts)
        step = 1.5 * float(rows[:count].max())
        slacks = np.maximum(0.1, np.concatenate([step - rows[:count], 1 - rows[count:]]))
        dual = np.concatenate([np.full(count, 1 / count), np.full(ranks, 1 / ranks)])
        again = spread.rows.again.mean(axis=0)[:, None, None] * spread.work
        dual_parts = np.maximum(1e-3 / kinds, spread.once + again + spread.held / ranks)
        return cls(parts, step, slacks, dual, np.zeros(kinds), dual_parts, 0.1)

    def moved(self, spread: Spread) -> _Point:
        """A step: towards the optimum as far as it goes, then with what that tells of the barrier (Mehrotra)."""
        newton = _Newton(spread, self)
        count = self.parts.size + self.slacks.size + 1
        gap = self._gap()
        ahead = newton.direction(0.0, None)
        far = self._along(ahead, *self._reach(ahead))
        centred = (far._gap() / gap) ** 3 * gap / count
        direction = newton.direction(centred, ahead)
        reach = self._reach(direction)
        return self._along(direction, min(1.0, _INSIDE * reach[0]), min(1.0, _INSIDE * reach[1]), newton.misses)

    def _gap(self) -> float:
        parts = float((self.parts * self.dual_parts).sum())
        return parts + float(self.slacks @ self.dual_rows) + self.step * self.dual_step

    def _reach(self, change: _Point) -> tuple[float, float]:
        """How far primal and dual can go until something is 0, at most 1."""
        primal = min(_lowest(self.parts, change.parts), _lowest(self.slacks, change.slacks), change.step / self.step)
        dual = min(
            _lowest(self.dual_parts, change.dual_parts),
            _lowest(self.dual_rows, change.dual_rows),
            change.dual_step / self.dual_step,
        )
        return 1.0 if primal >= -1 else -1 / primal, 1.0 if dual >= -1 else -1 / dual

    def _along(self, change: _Point, primal: float, dual: float, misses: float = np.inf) -> _Point:
        return _Point(
            self.parts + primal * change.parts,
            self.step + primal * change.step,
            self.slacks + primal * change.slacks,
            self.dual_rows + dual * change.dual_rows,
            self.dual_layers + dual * change.dual_layers,
            self.dual_parts + dual * change.dual_parts,
            self.dual_step + dual * change.dual_step,
            misses,
        )


def _lowest(here: Floats, change: Floats) -> float:
    """Least change of a value, as a part of it."""
    return float((change / here).min())


def _rows(spread: Spread, parts: Floats) -> Floats:
    """Left sides of the rows without T: ticks, then bytes of every rank."""
    ticks = spread.rows.fixed + (spread.once * parts).sum() + spread.rows.again @ (spread.work * parts).sum(axis=(1, 2))
    return np.concatenate([ticks, (spread.held * parts).sum(axis=(1, 2))])


def _columns(spread: Spread, rows: Floats) -> Floats:
    """Of every part, the sum of its coefficients times the rows' values."""
    count = len(spread.rows.fixed)
    ticks = rows[:count].sum() * spread.once + (rows[:count] @ spread.rows.again)[:, None, None] * spread.work
    columns: Floats = ticks + rows[count:, None, None] * spread.held
    return columns


class _Newton:
    """The equations of a step: of the rows alone, once parts, slacks and layers are eliminated."""

    def __init__(self, spread: Spread, point: _Point) -> None:
        self.spread, self.point = spread, point
        count = len(spread.rows.fixed)
        self.ends = np.concatenate([np.ones(count), np.zeros(len(spread.once))])
        # What is missed: rows, layers, parts' prices, the price of T.
        self.of_rows = 1 - self.ends + self.ends * point.step - point.slacks - _rows(spread, point.parts)
        self.of_layers = 1 - point.parts.sum(axis=(0, 2))
        self.of_parts = _columns(spread, point.dual_rows) - point.dual_layers[:, None] - point.dual_parts
        self.of_step = 1 - float(point.dual_rows[:count].sum()) - point.dual_step
        self.misses = float(max(abs(self.of_rows).max(), abs(self.of_layers).max()))
        self.scale = point.parts / point.dual_parts
        self.layers = self.scale.sum(axis=(0, 2))
        self.mixed = self._mixed()
        self.matrix = self._matrix()

    def _mixed(self) -> Floats:
        """[row, kind]."""
        once = (self.spread.once * self.scale).sum(axis=(0, 2))
        work = (self.spread.work * self.scale).sum(axis=2)
        held = (self.spread.held * self.scale).sum(axis=2)
        return np.concatenate([once[None, :] + self.spread.rows.again @ work, held])

    def _matrix(self) -> Floats:
        """A X/Z A' and slacks, without the layers."""
        spread, point, again = self.spread, self.point, self.spread.rows.again
        sums = [(each * self.scale).sum(axis=(1, 2)) for each in spread.squares]
        once, once_work, work, once_held, work_held, held = sums
        count, joint = len(again), again @ once_work
        matrix = np.zeros((count + len(held),) * 2)
        matrix[:count, :count] = once.sum() + joint[None, :] + joint[:, None] + (again * work) @ again.T
        matrix[:count, count:] = once_held[None, :] + again * work_held
        matrix[count:, :count] = matrix[:count, count:].T
        matrix[count:, count:] = np.diag(held)
        matrix += np.diag(point.slacks / point.dual_rows)
        matrix -= (self.mixed / self.layers) @ self.mixed.T
        matrix += np.outer(self.ends, self.ends) * point.step / point.dual_step
        return matrix

    def direction(self, barrier: float, ahead: _Point | None) -> _Point:
        """Where to go for products of primal and dual of so much; with the second order of a step ahead."""
        point, spread = self.point, self.spread
        parts = barrier - point.parts * point.dual_parts
        slacks = barrier - point.slacks * point.dual_rows
        step = barrier - point.step * point.dual_step
        if ahead is not None:
            parts = parts - ahead.parts * ahead.dual_parts
            slacks = slacks - ahead.slacks * ahead.dual_rows
            step = step - ahead.step * ahead.dual_step
        # dx = parts / z - scale (columns(dy) - dv + of_parts): z moves by columns(dy) - dv + of_parts
        moved = parts / point.dual_parts - self.scale * self.of_parts
        behind = self.of_layers - moved.sum(axis=(0, 2))
        step_moved = step / point.dual_step - point.step / point.dual_step * self.of_step
        # rows(dx) - ends dT + ds = of_rows
        right = self.of_rows - _rows(spread, moved) + self.ends * step_moved - slacks / point.dual_rows
        right = right - self.mixed @ (behind / self.layers)
        dual_rows = -np.linalg.solve(self.matrix, right)
        dual_layers = (behind + self.mixed.T @ dual_rows) / self.layers
        dual_parts = _columns(spread, dual_rows) - dual_layers[:, None] + self.of_parts
        dual_step = self.of_step - float(dual_rows @ self.ends)
        return _Point(
            moved - self.scale * (dual_parts - self.of_parts),
            step / point.dual_step - point.step / point.dual_step * dual_step,
            (slacks - point.slacks * dual_rows) / point.dual_rows,
            dual_rows,
            dual_layers,
            dual_parts,
            dual_step,
        )
