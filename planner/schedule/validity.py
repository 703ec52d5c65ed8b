"""What every schedule must hold, checked before it is made into a graph.

    complete    every stage runs F, and then either B, or I and W, of every unit, once and on its own rank
    in order    F stands before B or I, and I before W
    in sequence chunk c's forward stands after chunk c - 1's (its attention reads their keys and values), and its
                backward after chunk c + 1's (it gathers their gradients)

The checks look at whole columns at a time (`planner.schedule.columns`), since they run over every action of every
schedule; only once something is known to be wrong do slow searches find the two actions to name.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.errors import ScheduleError
from planner.schedule.actions import Action, Schedule
from planner.schedule.columns import Columns
from planner.schedule.rows import KINDS, Numbers


def check_schedule(schedule: Schedule) -> Columns:
    """The schedule's columns; raise `ScheduleError` unless it is complete and each rank's list in order.

    The error names two actions.
    """
    _check_shape(schedule)
    columns = _columns(schedule)
    places = _places(schedule, columns)
    _check_complete(schedule, places)
    _check_order(schedule, places)
    if schedule.sequence_chunks > 1:
        _check_sequence(schedule, places)
    return columns


def wrong(message: str, hint: str) -> ScheduleError:
    """The error of a schedule that cannot run."""
    return ScheduleError(message, field="actions", hint=hint)


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.ranks or set(schedule.stage_ranks) != set(
        range(schedule.ranks)
    ):
        raise wrong(
            f"{schedule.ranks} ranks, but lists of actions for {len(schedule.actions)} and stages on ranks "
            f"{sorted(set(schedule.stage_ranks))}.",
            "give every rank one list of actions and at least one stage.",
        )


def _columns(schedule: Schedule) -> Columns:
    """The columns of a schedule whose actions stand on their own ranks, in range."""
    try:
        columns = Columns.of(schedule)
    except OverflowError:  # a number far out of range: the slow search names it
        _check_each_place(schedule)
        raise
    stages, units = columns.stages, columns.units
    in_range = (
        (stages >= 0)
        & (stages < schedule.stages)
        & (units >= 0)
        & (units < schedule.units)
    )
    owners = np.array(schedule.stage_ranks)
    if not in_range.all():
        _check_each_place(schedule)
    if schedule.replica_ranks:
        owners = np.where(
            2 * units >= schedule.units,
            np.array(schedule.replica_ranks)[stages],
            owners[stages],
        )
    else:
        owners = owners[stages]
    if not np.array_equal(owners, columns.ranks):
        _check_each_place(schedule)
    return columns


def _check_each_place(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            _check_place(schedule, rank, action)


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    if not (
        0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.units
    ):
        raise wrong(
            f"{action} on rank {rank}, but there are {schedule.stages} stages and {schedule.units} micro-batches.",
            "count stages and micro-batches from 0.",
        )
    owner = schedule.owner(action.stage, action.micro_batch)
    if owner != rank:
        raise wrong(
            f"{action} stands on rank {rank}, but stage {action.stage} is on rank {owner}.",
            f"move it to rank {owner}.",
        )


def _places(schedule: Schedule, columns: Columns) -> Numbers:
    """Place of every action in its rank's list, from 1, by kind and ``stage * units + unit``; 0: it is nowhere."""
    size = schedule.stages * schedule.units
    places = np.zeros(len(KINDS) * size, dtype=np.int64)
    places[columns.kinds * size + columns.stages * schedule.units + columns.units] = (
        columns.places + 1
    )
    if np.count_nonzero(places) < len(columns.places):
        for rank, actions in enumerate(schedule.actions):
            _check_once(rank, actions)
    return places.reshape(len(KINDS), size)


def _check_once(rank: int, actions: Sequence[Action]) -> None:
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise wrong(
                f"{action} and again {action} stand on rank {rank}.",
                "run every action once.",
            )
        seen.add(action)


def _check_complete(schedule: Schedule, places: Numbers) -> None:
    forwards, backwards, inputs, weights = places > 0
    lacking = np.flatnonzero(~(forwards & (backwards ^ inputs) & (inputs == weights)))
    if len(lacking):
        present = tuple(map(int, places[:, lacking[0]] > 0))
        lack = _describe_lack(present, *divmod(int(lacking[0]), schedule.units))
        raise wrong(lack, "run F, and then either B, or I and W, of every micro-batch.")


def _describe_lack(present: tuple[int, ...], stage: int, unit: int) -> str:
    here = dict(zip("FBIW", present, strict=True))
    if here["F"] and here["B"]:
        return f"{stage}B{unit} is both full and split: {stage}I{unit} or {stage}W{unit} stands beside it."
    wanted = "FIW" if here["I"] or here["W"] else "FB"
    lacking = [f"{stage}{kind}{unit}" for kind in wanted if not here[kind]]
    existing = [f"{stage}{kind}{unit}" for kind in "FBIW" if here[kind]]
    return f"{' and '.join(lacking)} is missing" + (
        f", though {existing[0]} is there." if existing else "."
    )


def _check_order(schedule: Schedule, places: Numbers) -> None:
    """F before B or I, and I before W, of each stage and unit; places that are 0 stand for no action."""
    forwards, backwards, inputs, weights = places
    for early, late, kinds in (
        (forwards, backwards, "FB"),
        (forwards, inputs, "FI"),
        (inputs, weights, "IW"),
    ):
        disordered = np.flatnonzero((late > 0) & (early > late))
        if len(disordered):
            stage, unit = divmod(int(disordered[0]), schedule.units)
            raise _misplaced(
                schedule,
                f"{stage}{kinds[1]}{unit}",
                f"{stage}{kinds[0]}{unit}",
                stage,
                unit,
            )


def _misplaced(
    schedule: Schedule, late: str, early: str, stage: int, unit: int
) -> ScheduleError:
    rank = schedule.owner(stage, unit)
    return wrong(
        f"{late} stands before {early} on rank {rank}.", f"move {early} before {late}."
    )


def _check_sequence(schedule: Schedule, places: Numbers) -> None:
    """Chunks of one micro-batch forward in order, backward in reverse."""
    chunks = schedule.sequence_chunks
    forwards, backwards, inputs, _ = places
    late_forwards = np.diff(forwards.reshape(-1, chunks)) < 0
    late_gradients = np.diff(np.maximum(backwards, inputs).reshape(-1, chunks)) > 0
    late = np.argwhere(late_forwards | late_gradients)
    if not len(late):
        return
    row, chunk = map(int, late[0])
    index = row * chunks + chunk + 1
    stage, unit = divmod(index, schedule.units)
    if late_forwards[row, chunk]:
        raise _misplaced(
            schedule, f"{stage}F{unit}", f"{stage}F{unit - 1}", stage, unit
        )
    behind, before = ("B" if backwards[at] else "I" for at in (index - 1, index))
    raise _misplaced(
        schedule, f"{stage}{behind}{unit - 1}", f"{stage}{before}{unit}", stage, unit
    )
