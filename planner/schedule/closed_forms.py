"""Numbers of a schedule without building it: which shapes it takes, and how many units a rank runs or has resident.

All functions take arrays, one value per shape, and broadcast. P ranks, M micro-batches, V stages per rank, Q chunks; a
unit is one (stage, micro-batch, chunk). A rank's *local* stages are counted from 0, lowest stage first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.schedule.rows import Numbers

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Many shapes: arrays that broadcast against each other."""

    ranks: Numbers
    micro_batches: Numbers
    virtual_stages: Numbers
    sequence_chunks: Numbers

    @classmethod
    def of(cls, p: ArrayLike, m: ArrayLike, v: ArrayLike, q: ArrayLike) -> Shapes:
        """Shapes of these numbers, each 1 or more."""
        return cls(*(np.asarray(each, dtype=np.int64) for each in (p, m, v, q)))

    @property
    def units(self) -> Numbers:
        """Units of one stage."""
        return self.micro_batches * self.sequence_chunks


@dataclass(frozen=True, slots=True)
class Place:
    """A local stage of a pipeline rank, for many shapes."""

    shapes: Shapes
    rank: Numbers
    stage: Numbers
    """Local, below `Shapes.virtual_stages`."""

    @property
    def after(self) -> Numbers:
        """Ranks after this one."""
        return self.shapes.ranks - 1 - self.rank


Count = Callable[[Place], Numbers]
"""Units of a local stage."""


@dataclass(frozen=True, slots=True)
class ClosedForms:
    """Units of every local stage at the moments that decide memory and time."""

    held: Count
    """Resident at the first moment when the rank has most units resident. A vector that really occurs."""
    ahead: Count
    """Forwards before the rank's first backward (or input gradient)."""
    lead: Count
    """Forwards up to and including the one of the last local stage whose unit has the rank's first backward."""
    late: Count | None = None
    """Weight gradients after the rank's last input gradient, at most; None: backwards are not split."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Units run local stage by local stage inside groups; units of one stage in every group."""

    first: Numbers
    count: Numbers
    """How many groups have `first` units."""
    later: Numbers
    """Units of each group after them."""

    @classmethod
    def equal(cls, size: Numbers) -> Groups:
        """Groups of one size."""
        return cls(size, np.ones_like(size), size)

    def of_stage(self, place: Place, run: Numbers) -> Numbers:
        """Units of a local stage among the first `run` units of its rank."""
        stages = place.shapes.virtual_stages
        run = np.minimum(run, place.shapes.units * stages)
        early = np.minimum(run, self.first * self.count * stages)
        return _in_rounds(early, self.first, place) + _in_rounds(
            run - early, self.later, place
        )


def _in_rounds(run: Numbers, size: Numbers, place: Place) -> Numbers:
    """Units of a local stage among the first `run` units in groups of one size."""
    rounds, rest = np.divmod(run, size * place.shapes.virtual_stages)
    started: Numbers = np.clip(rest - place.stage * size, 0, size)
    return rounds * size + started


def one_group(shapes: Shapes) -> Groups:
    """All units of a local stage before the next stage's."""
    return Groups.equal(shapes.units)


def rounds_of_ranks(shapes: Shapes) -> Groups:
    """The groups of interleaved 1F1B."""
    rounds = np.maximum(1, shapes.micro_batches // shapes.ranks)
    return Groups.equal(shapes.micro_batches // rounds * shapes.sequence_chunks)


def longer_first_group(shapes: Shapes) -> Groups:
    """Groups of P micro-batches, the remainder in the first one."""
    first = shapes.ranks + shapes.micro_batches % shapes.ranks
    return Groups(first, np.ones_like(first), shapes.ranks + 0 * first)


def groups_of(size: Numbers, shapes: Shapes) -> Groups:
    """As `planner.schedule.sequence.equal_groups`."""
    count = np.maximum(1, shapes.micro_batches // np.maximum(1, size))
    each, larger = np.divmod(shapes.micro_batches, count)
    has_larger = larger > 0
    return Groups(
        first=(each + has_larger) * shapes.sequence_chunks,
        count=np.where(has_larger, larger, count),
        later=each * shapes.sequence_chunks,
    )


def family_1f1b(
    warm_up: Count,
    groups: Callable[[Shapes], Groups] = one_group,
    delay: Count | None = None,
) -> ClosedForms:
    """Forms of warm-up, then one forward and one backward in turn.

    Args:
        warm_up: forwards of all local stages before the first pair.
        groups: order of the units.
        delay: backwards by which weight gradients are put off; None: backwards are not split.
    """

    def run(place: Place, units: Numbers) -> Numbers:
        return groups(place.shapes).of_stage(place, units)

    def held(place: Place) -> Numbers:
        put_off = 0 if delay is None else delay(place)
        return run(place, warm_up(place) + 1 + put_off)

    def lead(place: Place) -> Numbers:
        shapes = place.shapes
        before = (shapes.virtual_stages - 1) * groups(shapes).first
        return run(place, before + shapes.sequence_chunks)

    def late(place: Place) -> Numbers:
        assert delay is not None
        most = np.minimum(place.shapes.units, delay(place) + 1)
        return np.where(place.stage == 0, most, 0)

    return ClosedForms(
        held=held,
        ahead=lambda place: run(place, warm_up(place) + 1),
        lead=lead,
        late=None if delay is None else late,
    )


def every_unit(place: Place) -> Numbers:
    """All units of the stage."""
    return place.shapes.units + 0 * (place.rank + place.stage)


FORWARDS_FIRST = ClosedForms(held=every_unit, ahead=every_unit, lead=every_unit)
"""All forwards, then all backwards, the last unit first."""


def _except_last_stage(place: Place, before: Numbers, last: Numbers) -> Numbers:
    """`last` units of the last local stage, `before` of the others; no more than there are."""
    is_last = place.stage == place.shapes.virtual_stages - 1
    return np.minimum(place.shapes.units, np.where(is_last, last, before))


def _zb_v_held(place: Place) -> Numbers:
    return _except_last_stage(place, place.shapes.ranks + place.after, place.rank + 1)


def _v_lead(place: Place) -> Numbers:
    ones = np.ones_like(place.rank)
    return _except_last_stage(place, 2 * place.after + 1, ones)


def _zb_v_late(place: Place) -> Numbers:
    return _except_last_stage(place, place.rank + 1, place.rank)


ZB_V_FORMS = ClosedForms(_zb_v_held, _zb_v_held, _v_lead, _zb_v_late)


def _dualpipev_held(place: Place) -> Numbers:
    return _except_last_stage(
        place, place.shapes.ranks + place.after + 1, place.rank + 1
    )


def _dualpipev_ahead(place: Place) -> Numbers:
    meets = place.after == 0
    return _except_last_stage(
        place, place.shapes.ranks + place.after + meets, place.rank + 1
    )


def _dualpipev_late(place: Place) -> Numbers:
    upwards = np.maximum(0, place.rank + 1 - place.after) // 2
    return _except_last_stage(place, place.rank + 1 - upwards, upwards)


DUALPIPEV_FORMS = ClosedForms(
    _dualpipev_held, _dualpipev_ahead, _v_lead, _dualpipev_late
)


def _hanayo_held(place: Place) -> Numbers:
    return _except_last_stage(
        place, place.shapes.ranks + 0 * place.rank, place.rank + 1
    )


def _hanayo_lead(place: Place) -> Numbers:
    ranks, last = place.shapes.ranks, place.shapes.virtual_stages - 1
    down, up = place.rank, place.after
    stage = place.stage * ranks + np.where(place.stage % 2 == 0, down, up)
    last_stage = last * ranks + up
    slots = (last_stage - stage) // 2 + 1
    run: Numbers = np.minimum(np.minimum(ranks, slots), place.shapes.units)
    return run


HANAYO_FORMS = ClosedForms(_hanayo_held, _hanayo_held, _hanayo_lead)


def warm_up_per_rank(each: int) -> Count:
    """Forwards ahead: this number per later rank."""
    return lambda place: each * place.after


def warm_up_over_stages(
    each: int, groups: Callable[[Shapes], Groups], *, all_chunks: bool = False
) -> Count:
    """All but the last local stage of the first group, and so many forwards per rank after this one.

    Args:
        each: forwards per rank after this one.
        groups: order of the units.
        all_chunks: wait for all chunks of the first micro-batch.
    """

    def warm_up(place: Place) -> Numbers:
        shapes = place.shapes
        stages_before = (shapes.virtual_stages - 1) * groups(shapes).first
        chunks_before = (shapes.sequence_chunks - 1) * int(all_chunks)
        ahead: Numbers = each * place.after + stages_before + chunks_before
        return ahead

    return warm_up


def small_groups(shapes: Shapes) -> Groups:
    """The groups of SeqVPP."""
    return groups_of(shapes.ranks // shapes.sequence_chunks, shapes)


def groups_of_ranks(shapes: Shapes) -> Groups:
    """The groups of SeqPipe."""
    return groups_of(shapes.ranks, shapes)


def rounds_of_ranks_or_one(shapes: Shapes) -> Groups:
    """The groups of ZB-H1: one with one stage per rank, else those of interleaved 1F1B."""
    size = np.where(
        shapes.virtual_stages == 1, shapes.units, rounds_of_ranks(shapes).first
    )
    return Groups.equal(size)


def has_equal_groups(shapes: Shapes) -> Mask:
    """Return whether micro-batches make equal groups of about as many as the ranks."""
    rounds = np.maximum(1, shapes.micro_batches // shapes.ranks)
    are_equal: Mask = shapes.micro_batches % rounds == 0
    return are_equal


def fills_ranks(shapes: Shapes) -> Mask:
    """Return whether there are at most as many chunks as ranks, and at least as many units."""
    are_few = shapes.sequence_chunks <= shapes.ranks
    are_filled: Mask = are_few & (shapes.units >= shapes.ranks)
    return are_filled


def comes_round(shapes: Shapes) -> Mask:
    """Return whether the smallest group of SeqVPP does not end before the first rank's next stage."""
    groups = small_groups(shapes)
    is_alone = groups.first == shapes.units
    comes: Mask = is_alone | (groups.later >= shapes.ranks - 1)
    return comes
