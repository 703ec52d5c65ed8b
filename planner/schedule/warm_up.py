"""The pattern behind the 1F1B family: some forwards ahead, then one forward and one backward in turn, then the rest.

Schedules of the family differ only in three things: how many forwards a rank runs ahead (its warm-up), in which order
it takes its units, and how long it puts off weight gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from planner.schedule.actions import Action, ActionKind, actions_of
from planner.schedule.entry import Shape

Unit = tuple[int, int]
"""(stage, micro-batch), what a rank runs forward and backward once."""


def micro_batches_in_order(shape: Shape, rank: int) -> list[Unit]:
    """The units of a rank with one stage."""
    return [(rank, micro_batch) for micro_batch in range(shape.micro_batches)]


def grouped_units(shape: Shape, rank: int, groups: Iterable[int]) -> tuple[list[Unit], list[Unit]]:
    """Forward and backward order of a rank with several stages, in loop placement.

    Micro-batches run in groups of the given sizes; inside a group chunk by chunk, backwards from the last chunk.
    """
    stages = range(rank, shape.ranks * shape.virtual_stages, shape.ranks)
    forwards: list[Unit] = []
    backwards: list[Unit] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        forwards += [(stage, micro_batch) for stage in stages for micro_batch in group]
        backwards += [(stage, micro_batch) for stage in reversed(stages) for micro_batch in group]
        first += size
    return forwards, backwards


def one_forward_one_backward(forwards: Sequence[Unit], backwards: Sequence[Unit], warm_up: int) -> tuple[Action, ...]:
    """Actions of one rank: `warm_up` forwards, then forward and backward in turn, then the remaining backwards.

    A warm-up longer than the number of units is all forwards, then all backwards.
    """
    ahead = min(warm_up, len(forwards))
    forward_actions = actions_of(ActionKind.FORWARD, forwards)
    backward_actions = actions_of(ActionKind.BACKWARD, backwards)
    steady = chain.from_iterable(zip(forward_actions[ahead:], backward_actions, strict=False))
    return (*forward_actions[:ahead], *steady, *backward_actions[len(forwards) - ahead :])


def split_backwards(actions: Sequence[Action], delay: int) -> tuple[Action, ...]:
    """Split every full backward, and put weight gradients off by `delay` backwards.

    The k-th input gradient is followed by the weight gradient of the (k - delay)-th; what is left stands at the end.
    """
    backwards = [(stage, micro_batch) for stage, kind, micro_batch in actions if kind is ActionKind.BACKWARD]
    inputs = iter(actions_of(ActionKind.BACKWARD_INPUT, backwards))
    weights = iter(actions_of(ActionKind.BACKWARD_WEIGHT, backwards))
    split: list[Action] = []
    put_off = 0
    for action in actions:
        if action.kind is not ActionKind.BACKWARD:
            split.append(action)
            continue
        split.append(next(inputs))
        put_off += 1
        if put_off > delay:
            split.append(next(weights))
    return (*split, *weights)
