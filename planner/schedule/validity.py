"""What every schedule must hold, checked before it is made into a graph.

    complete    every stage runs F, and then either B, or I and W, of every unit, once and on its own rank
    in order    F stands before B or I, and I before W
    in sequence chunk c's forward stands after chunk c - 1's (its attention reads their keys and values), and its
                backward after chunk c + 1's (it gathers their gradients)

The checks look at whole lists at a time, since they run over every action of every schedule; only once something is
known to be wrong do slow searches find the two actions to name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import le, lt

from planner.errors import ScheduleError
from planner.schedule.actions import Action, ActionKind, Schedule

KINDS = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
_FLIPPED = bytes((1, 0)) + bytes(254)


def check_schedule(schedule: Schedule) -> None:
    """Raise `ScheduleError` unless the schedule is complete and each rank's list in order; names two actions."""
    _check_shape(schedule)
    for rank, actions in enumerate(schedule.actions):
        _check_places(schedule, rank, actions)
    places = _places(schedule)
    _check_complete(schedule, places)
    _check_order(schedule, places)
    if schedule.sequence_chunks > 1:
        _check_sequence(schedule, places)


def wrong(message: str, mend: str) -> ScheduleError:
    """The error of a schedule that cannot run."""
    return ScheduleError(message, field="actions", mend=mend)


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.actions) != schedule.ranks or set(schedule.stage_ranks) != set(range(schedule.ranks)):
        raise wrong(
            f"{schedule.ranks} ranks, but lists of actions for {len(schedule.actions)} and stages on ranks "
            f"{sorted(set(schedule.stage_ranks))}.",
            "give every rank one list of actions and at least one stage.",
        )


def _check_places(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    if not actions:
        return
    stages = {stage for stage, _, _ in actions}
    units = {unit for _, _, unit in actions}
    is_known = min(stages) >= 0 and max(stages) < schedule.stages and min(units) >= 0 and max(units) < schedule.units
    if is_known and not schedule.replica_ranks and all(schedule.stage_ranks[stage] == rank for stage in stages):
        return
    for action in actions:
        _check_place(schedule, rank, action)


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    if not (0 <= action.stage < schedule.stages and 0 <= action.micro_batch < schedule.units):
        raise wrong(
            f"{action} on rank {rank}, but there are {schedule.stages} stages and {schedule.units} micro-batches.",
            "count stages and micro-batches from 0.",
        )
    owner = schedule.owner(action.stage, action.micro_batch)
    if owner != rank:
        raise wrong(
            f"{action} stands on rank {rank}, but stage {action.stage} is on rank {owner}.", f"move it to rank {owner}."
        )


class _Places:
    """Place of every action in its rank's list, from 1, by kind and ``stage * units + unit``; 0: it is nowhere."""

    def __init__(self, schedule: Schedule) -> None:
        size = schedule.stages * schedule.units
        self._units, self._size = schedule.units, size
        self._start = {kind: index * size for index, kind in enumerate(KINDS)}
        self._all = [0] * (len(KINDS) * size)

    def add(self, rank: int, actions: Sequence[Action]) -> None:
        """Take a rank's list in."""
        start, units, places = self._start, self._units, self._all
        for place, (stage, kind, unit) in enumerate(actions, 1):
            index = start[kind] + stage * units + unit
            if places[index]:
                raise wrong(
                    f"{actions[places[index] - 1]} and again {actions[place - 1]} stand on rank {rank}.",
                    "run every action once.",
                )
            places[index] = place

    def of(self, kind: ActionKind) -> list[int]:
        """Places of one kind."""
        return self._all[self._start[kind] : self._start[kind] + self._size]


def _places(schedule: Schedule) -> list[list[int]]:
    """Places by kind, in the order of `KINDS`."""
    places = _Places(schedule)
    for rank, actions in enumerate(schedule.actions):
        places.add(rank, actions)
    return [places.of(kind) for kind in KINDS]


def _check_complete(schedule: Schedule, places: list[list[int]]) -> None:
    forwards, backwards, inputs, weights = (bytes(map(bool, each)) for each in places)
    if all(forwards) and inputs == weights and backwards == inputs.translate(_FLIPPED):
        return
    for index, present in enumerate(zip(forwards, backwards, inputs, weights, strict=True)):
        if present not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            lack = _describe_lack(present, *divmod(index, schedule.units))
            raise wrong(lack, "run F, and then either B, or I and W, of every micro-batch.")


def _describe_lack(present: tuple[int, ...], stage: int, unit: int) -> str:
    here = dict(zip("FBIW", present, strict=True))
    if here["F"] and here["B"]:
        return f"{stage}B{unit} is both full and split: {stage}I{unit} or {stage}W{unit} stands beside it."
    wanted = "FIW" if here["I"] or here["W"] else "FB"
    lacking = [f"{stage}{kind}{unit}" for kind in wanted if not here[kind]]
    existing = [f"{stage}{kind}{unit}" for kind in "FBIW" if here[kind]]
    return f"{' and '.join(lacking)} is missing" + (f", though {existing[0]} is there." if existing else ".")


def _check_order(schedule: Schedule, places: list[list[int]]) -> None:
    """F before B or I, and I before W, of each stage and unit; places that are 0 stand for no action."""
    forwards, backwards, inputs, weights = places
    if all(map(lt, forwards, map(max, backwards, inputs))) and all(map(le, inputs, weights)):
        return
    for early, late, kinds in ((forwards, backwards, "FB"), (forwards, inputs, "FI"), (inputs, weights, "IW")):
        for index in _disordered(early, late):
            stage, unit = divmod(index, schedule.units)
            raise _misplaced(schedule, f"{stage}{kinds[1]}{unit}", f"{stage}{kinds[0]}{unit}", stage, unit)


def _disordered(early: Sequence[int], late: Sequence[int]) -> Iterator[int]:
    return (index for index, (a, b) in enumerate(zip(early, late, strict=True)) if b and a > b)


def _misplaced(schedule: Schedule, late: str, early: str, stage: int, unit: int) -> ScheduleError:
    rank = schedule.owner(stage, unit)
    return wrong(f"{late} stands before {early} on rank {rank}.", f"move {early} before {late}.")


def _check_sequence(schedule: Schedule, places: list[list[int]]) -> None:
    """Chunks of one micro-batch forward in order, backward in reverse."""
    forwards, backwards, inputs, _ = places
    gradients = list(map(max, backwards, inputs))
    for index in range(1, len(forwards)):
        if index % schedule.sequence_chunks == 0:
            continue
        stage, unit = divmod(index, schedule.units)
        if forwards[index] < forwards[index - 1]:
            raise _misplaced(schedule, f"{stage}F{unit}", f"{stage}F{unit - 1}", stage, unit)
        if gradients[index] > gradients[index - 1]:
            late, early = ("B" if backwards[at] else "I" for at in (index - 1, index))
            raise _misplaced(schedule, f"{stage}{late}{unit - 1}", f"{stage}{early}{unit}", stage, unit)
