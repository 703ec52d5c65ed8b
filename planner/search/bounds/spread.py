"""A lower bound where pipeline ranks differ: what a step takes if layers could be cut, and spread over ranks freely.

A column of alike data ranks has pipeline ranks p, each with room R(p), on which layer l in recompute mode r takes f and
b ticks forward and backward, holds o bytes of OGP and a bytes of activations per micro-batch. With M micro-batches,
u(p) = min(M, P - p), and x(p, l, r) the fraction of a layer that is on a rank in a mode, no stage map that fits beats

    (U1)  least T such that every layer is somewhere, sum over p, r of x = 1, and for every rank
          T >= W + sum over l, r of ((M - u) f + (M - 1) b) x, W = sum of (f + b) x over all ranks      (B2)
               and of the tails on rank 0, where the last gradient comes up                             (S3)
          R >= sum over l, r of (o + u a) x; under gpipe M a                                           (M1), (M2)
    (U2)  any weights q(p) >= 0 of sum 1 and prices m(p) >= 0 of its bytes tell that (Lagrange)
          T >= sum over l of the least over p, r of f + b + q ((M - u) f + (M - 1) b) + m (o + u a), less sum of m R
                                                                                                       -> Spread.dual()
    (U3)  the q and m for which (U2) tells most are the dual solution of (U1). They are approached from inside by
          Newton steps towards a falling barrier (primal-dual interior point method: Mehrotra 1992); whatever they are
          then, (U2) holds                                                                             -> Spread.bound()

(B2) holds for gpipe as well, where all forwards come before the backwards. Transfers and temporaries count nothing.
Layers that cost the same are one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_STEPS = 30
"""Newton steps at most; about fifteen are enough."""
_CLOSE = 1e-3
"""Relative gap at which the next step is not worth its time."""
_INSIDE = 0.9
"""Part of the way to the nearest face that a step goes."""
ROUNDING = 1e-9
"""Of floating-point sums, for bounds that must not be too high."""
_MOST_TICKS = 2.0**53


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
    in_order: bool = False
    """Is every layer of the model a kind of its own, in order?"""
    boundary_bytes: Floats | None = None
    """Of a micro-batch behind every layer of the model; None: not told."""

    def with_exchanges(self, in_micro_batch: float, in_step: float) -> RankLoad:
        """With so many ticks more per element."""
        assert self.elements is not None, (
            "elements are known as long as nothing is priced"
        )
        forward = self.forward + in_micro_batch * self.elements
        return replace(self, forward=forward, tail=in_step * self.elements)


@dataclass(frozen=True)
class Spread:
    """The linear programme (U1) of one column, with ticks and bytes scaled to about 1."""

    once: Floats
    """f + b, [rank, kind, mode]."""
    later: Floats
    """(M - u) f + (M - 1) b."""
    held: Floats
    """(o + u a) / R."""
    ticks: float
    """That the scaled 1 stands for."""

    @classmethod
    def of(
        cls, ranks: Sequence[RankLoad], micro_batches: int, in_flight: Sequence[int]
    ) -> Self:
        """A column.

        Args:
            ranks: its pipeline ranks, in order.
            micro_batches: M.
            in_flight: how many of them every rank holds at once, at least.
        """
        count, places = micro_batches, range(len(ranks))
        ahead = [min(count, len(ranks) - place) for place in places]
        once = np.stack([each.forward + each.backward for each in ranks])
        once[0] += ranks[0].tail
        later = np.stack(
            [
                (count - ahead[p]) * ranks[p].forward + (count - 1) * ranks[p].backward
                for p in places
            ]
        )
        bytes_ = np.stack(
            [
                ranks[p].ogp_bytes + in_flight[p] * ranks[p].activation_bytes
                for p in places
            ]
        )
        held = (
            bytes_
            / np.array([max(1, each.room_bytes) for each in ranks])[:, None, None]
        )
        scale = max(1.0, float((once + later / len(ranks)).mean(axis=(0, 2)).sum()))
        return cls(once / scale, later / scale, held, scale)

    def dual(self, weights: Floats, prices: Floats) -> float:
        """Scaled ticks by (U2).

        Args:
            weights: q, of sum 1.
            prices: m R, not negative.
        """
        reduced = (
            self.once
            + weights[:, None, None] * self.later
            + prices[:, None, None] * self.held
        )
        return float(reduced.min(axis=(0, 2)).sum() - prices.sum())

    def bound(self, enough_ticks: float = _MOST_TICKS) -> int:
        """Ticks by (U3); what is at least `enough_ticks` need not be told more exactly."""
        return self.bound_and_rows(enough_ticks)[0]

    def bound_and_rows(
        self, enough_ticks: float, known: Floats | None = None
    ) -> tuple[int, Floats]:
        """Ticks by (U3), and the weights and prices that tell most.

        Args:
            enough_ticks: that need not be told more exactly.
            known: weights and prices of a similar column, which may tell enough at once.
        """
        ranks = len(self.once)
        rows = np.full(2 * ranks, 1 / ranks) if known is None else known
        best, point = self.dual(rows[:ranks], rows[ranks:]), _Point.first(self)
        with (
            np.errstate(all="ignore"),
            suppress(np.linalg.LinAlgError),
        ):  # where nothing fits, the prices have no limit
            for _ in range(_STEPS):
                is_close = point.misses < _CLOSE and point.step - best <= _CLOSE * best
                if best * self.ticks >= enough_ticks or is_close:
                    break
                point = point.moved(self)
                tried = point.dual_rows / point.dual_rows[:ranks].sum()
                told = self.dual(tried[:ranks], tried[ranks:])
                best, rows = (told, tried) if told > best else (best, rows)
        return max(0, int(min(_MOST_TICKS, best * self.ticks * (1 - ROUNDING)))), rows

    @cached_property
    def squares(self) -> tuple[Floats, ...]:
        """Products of the rows' coefficients."""
        once, later, held = self.once, self.later, self.held
        return (
            once * once,
            once * later,
            later * later,
            once * held,
            later * held,
            held * held,
        )


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
        ranks, kinds, modes = spread.once.shape
        parts = np.full(spread.once.shape, 1 / (ranks * modes))
        rows = _rows(spread, parts)
        step = 1.5 * float(rows[:ranks].max())
        slacks = np.maximum(
            0.1, np.concatenate([step - rows[:ranks], 1 - rows[ranks:]])
        )
        dual = np.full(2 * ranks, 1 / ranks)
        dual_parts = np.maximum(
            1e-3 / kinds, spread.once + spread.later / ranks + spread.held / ranks
        )
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
        return self._along(
            direction,
            min(1.0, _INSIDE * reach[0]),
            min(1.0, _INSIDE * reach[1]),
            newton.misses,
        )

    def _gap(self) -> float:
        parts = float((self.parts * self.dual_parts).sum())
        return parts + float(self.slacks @ self.dual_rows) + self.step * self.dual_step

    def _reach(self, change: _Point) -> tuple[float, float]:
        """How far primal and dual can go until something is 0, at most 1."""
        primal = min(
            _lowest(self.parts, change.parts),
            _lowest(self.slacks, change.slacks),
            change.step / self.step,
        )
        dual = min(
            _lowest(self.dual_parts, change.dual_parts),
            _lowest(self.dual_rows, change.dual_rows),
            change.dual_step / self.dual_step,
        )
        return 1.0 if primal >= -1 else -1 / primal, 1.0 if dual >= -1 else -1 / dual

    def _along(
        self, change: _Point, primal: float, dual: float, misses: float = np.inf
    ) -> _Point:
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
    """Left sides of the rows without T: ticks of every rank, then bytes."""
    ticks = (spread.once * parts).sum() + (spread.later * parts).sum(axis=(1, 2))
    return np.concatenate([ticks, (spread.held * parts).sum(axis=(1, 2))])


def _columns(spread: Spread, rows: Floats) -> Floats:
    """Of every part, the sum of its coefficients times the rows' values."""
    ranks = len(spread.once)
    ticks = rows[:ranks].sum() * spread.once + rows[:ranks, None, None] * spread.later
    columns: Floats = ticks + rows[ranks:, None, None] * spread.held
    return columns


class _Newton:
    """The equations of a step: of the rows alone, once parts, slacks and layers are eliminated."""

    def __init__(self, spread: Spread, point: _Point) -> None:
        self.spread, self.point = spread, point
        ranks = len(spread.once)
        self.ends = np.concatenate([np.ones(ranks), np.zeros(ranks)])
        # What is missed: rows, layers, parts' prices, the price of T.
        self.of_rows = (
            1
            - self.ends
            + self.ends * point.step
            - point.slacks
            - _rows(spread, point.parts)
        )
        self.of_layers = 1 - point.parts.sum(axis=(0, 2))
        self.of_parts = (
            _columns(spread, point.dual_rows)
            - point.dual_layers[:, None]
            - point.dual_parts
        )
        self.of_step = 1 - float(point.dual_rows[:ranks].sum()) - point.dual_step
        self.misses = float(max(abs(self.of_rows).max(), abs(self.of_layers).max()))
        self.scale = point.parts / point.dual_parts
        self.layers = self.scale.sum(axis=(0, 2))
        self.mixed = self._mixed()
        self.matrix = self._matrix()

    def _mixed(self) -> Floats:
        """[row, kind]."""
        once = (self.spread.once * self.scale).sum(axis=(0, 2))
        later = (self.spread.later * self.scale).sum(axis=2)
        held = (self.spread.held * self.scale).sum(axis=2)
        return np.concatenate([once[None, :] + later, held])

    def _matrix(self) -> Floats:
        """A X/Z A' and slacks, without the layers."""
        spread, point, ranks = self.spread, self.point, len(self.spread.once)
        sums = [(each * self.scale).sum(axis=(1, 2)) for each in spread.squares]
        once, once_later, later, once_held, later_held, held = sums
        matrix = np.zeros((2 * ranks, 2 * ranks))
        matrix[:ranks, :ranks] = (
            once.sum() + once_later[None, :] + once_later[:, None] + np.diag(later)
        )
        matrix[:ranks, ranks:] = once_held[None, :] + np.diag(later_held)
        matrix[ranks:, :ranks] = matrix[:ranks, ranks:].T
        matrix[ranks:, ranks:] = np.diag(held)
        matrix += np.diag(point.slacks / point.dual_rows)
        # Not by BLAS: its threads take longer to start than so small a product takes.
        matrix -= np.einsum("ik,jk->ij", self.mixed / self.layers, self.mixed)
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
        step_moved = (
            step / point.dual_step - point.step / point.dual_step * self.of_step
        )
        # rows(dx) - ends dT + ds = of_rows
        right = (
            self.of_rows
            - _rows(spread, moved)
            + self.ends * step_moved
            - slacks / point.dual_rows
        )
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
