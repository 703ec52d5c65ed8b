"""Longest paths through an order of actions, as linear bounds on the step of any cut.

An action of an order waits for the one before it on its rank and for its input, whatever
the durations are. So every path through these waits is a bound: with n(s) forwards and
m(s) backwards of stage s on the path, and h transfers between ranks,

    T >= sum over s of n(s) f(s) + m(s) b(s) + (n + m) waiting + h transfer + tail     (F1)

for all durations f and b. Rank r recomputes for R(r) nanoseconds per micro-batch on any
of its stages, which adds R(r) times the least m(s) of its stages at least.

The paths are the longest ones of equal stages, and of equal stages of which those of one
rank take a little longer: they lead through the actions of that rank.

A chunk of a micro-batch takes whole nanoseconds of each of its parts, that is less than
one nanosecond below its exact share of the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.schedule import Schedule, build, find
from planner.schedule.critical_path import CriticalPath, critical_path
from planner.schedule.durations import Durations
from planner.search.engine.bound import Order, stage_ranks
from planner.search.engine.prices import Floats
from planner.search.engine.split_backward import splits_backward

MOST_UNITS = 1 << 15
"""Micro-batches and chunks of all stages, up to which an order is built for its paths."""
_FORWARD = 1000
"""Units of time of a forward of equal stages; a backward takes twice as long."""
_LONGER = 20
"""What is added to those of one rank."""
_FORWARD_PARTS = 2
"""Parts of a chunk's forward: attention, and everything else."""
_INPUT_PARTS = 2
"""Of a chunk's backward without the gradients of weights."""
_BACKWARD_PARTS = 4
"""Of a chunk's backward with the gradients of weights, and what it recomputes."""


class StageWork(NamedTuple):
    """Nanoseconds of a micro-batch, per option or cut."""

    forward: Floats
    """Of every stage, as those of `Paths`."""
    forward_attention: Floats
    backward: Floats
    input: Floats
    weight: Floats
    backward_attention: Floats
    recomputation: Floats
    """Of every rank, on any of its stages."""
    tails: Floats
    """Of every rank."""
    waiting: Floats
    transfer: Floats


@dataclass(frozen=True)
class Paths:
    """Counts of some paths; a chunk counts as its part of a micro-batch."""

    forward: Floats
    """Forwards without attention, [path, stage]."""
    forward_attention: Floats
    """Attention of forwards, of which later chunks have more."""
    backward: Floats
    """Backwards with the gradients of weights."""
    input: Floats
    """Backwards without them."""
    weight: Floats
    backward_attention: Floats
    actions: Floats
    """Forwards and backwards that wait for a transfer's kernel, [path]."""
    transfers: Floats
    ends: tuple[int, ...]
    """Rank of the last action of every path."""
    repeats: Floats
    """Backwards of every rank that recompute at least, [path, rank]."""
    rounding: Floats
    """Nanoseconds that whole ones of all chunks are below exact ones at most, [path]."""

    def nanoseconds(self, work: StageWork) -> Floats:
        """Return the longest of the paths, per option or cut."""
        total = work.forward @ self.forward.T
        total = total + work.forward_attention @ self.forward_attention.T
        total = total + work.backward @ self.backward.T
        total = total + work.input @ self.input.T
        total = total + work.weight @ self.weight.T
        total = total + work.backward_attention @ self.backward_attention.T
        total = total + work.recomputation @ self.repeats.T
        total = total + work.waiting[:, None] * self.actions
        total = total + work.transfer[:, None] * self.transfers - self.rounding
        longest: Floats = (total + work.tails[:, self.ends]).max(axis=1)
        return longest


@lru_cache(maxsize=1 << 13)
def paths_of(order: Order) -> Paths | None:
    """Return paths through an order; None: it is not known, too long, or never ends."""
    entry = find(order.schedule)
    units = order.ranks * order.virtual_stages * order.micro_batches * order.chunks
    if entry.needs_durations or entry.is_asynchronous or units > MOST_UNITS:
        return None
    schedule = build(
        order.schedule,
        ranks=order.ranks,
        micro_batches=order.micro_batches,
        virtual_stages=order.virtual_stages if order.virtual_stages > 1 else None,
        sequence_chunks=order.chunks,
    )
    return _counted(order, list(_longest(order, schedule).values()))


def _longest(order: Order, schedule: Schedule) -> dict[tuple[int, ...], CriticalPath]:
    """Return the distinct longest paths, by what they count."""
    found = {}
    for slow in (None, 0):
        path = critical_path(schedule, _durations(order, slow))
        found[path.forward + path.backward + path.backward_input] = path
    return found


def _durations(order: Order, slow: int | None) -> Durations:
    """Return durations of equal stages; those of one rank are a little longer."""
    ranks = np.array(stage_ranks(order))
    forward = np.where(ranks == slow, _FORWARD + _LONGER, _FORWARD)
    weight = forward if splits_backward(order.schedule) else 0 * forward
    backward = 2 * forward - weight

    def listed(values: np.ndarray) -> tuple[int, ...]:
        return tuple(np.repeat(values, order.chunks).tolist())

    moves = (1,) * (len(ranks) - 1)
    return Durations(
        forward=listed(forward),
        backward_input=listed(backward),
        backward_weight=listed(weight),
        transfer_forward=moves,
        transfer_backward=moves,
        sequence_chunks=order.chunks,
    )


def _counted(order: Order, paths: Sequence[CriticalPath]) -> Paths:
    chunks = order.chunks

    def counts(name: str) -> Floats:
        values = np.array([getattr(path, name) for path in paths], dtype=np.float64)
        return values.reshape(len(paths), -1, chunks)

    parts = np.full(chunks, 1 / chunks)
    attention = (2 * np.arange(chunks) + 1) / chunks**2
    forward, backward = counts("forward"), counts("backward")
    inputs, weight = counts("backward_input"), counts("backward_weight")
    actions = (forward + backward + inputs).sum(axis=(1, 2))
    rounding = np.zeros(len(paths))
    if chunks > 1:
        parts_of_actions = _FORWARD_PARTS * forward + _INPUT_PARTS * inputs
        parts_of_actions += _BACKWARD_PARTS * backward + weight
        rounding = parts_of_actions.sum(axis=(1, 2))
    moves = [sum(each.transfer_forward + each.transfer_backward) for each in paths]
    return Paths(
        forward=forward @ parts,
        forward_attention=forward @ attention,
        backward=backward @ parts,
        input=inputs @ parts,
        weight=weight @ parts,
        backward_attention=(backward + inputs) @ attention,
        actions=actions,
        transfers=np.array(moves, dtype=np.float64),
        ends=tuple(path.rank for path in paths),
        repeats=_repeats(order, counts("backward"), np.minimum(parts, attention)),
        rounding=rounding,
    )


def _repeats(order: Order, backward: Floats, parts: Floats) -> Floats:
    """Return the fewest backwards of any stage of a rank, [path, rank]."""
    of_stages = backward @ parts
    found = np.full((len(of_stages), order.ranks), np.inf)
    for stage, rank in enumerate(stage_ranks(order)):
        found[:, rank] = np.minimum(found[:, rank], of_stages[:, stage])
    return np.where(np.isfinite(found), found, 0.0)
