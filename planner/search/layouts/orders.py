"""In which order micro-batches may run: the schedules that the search chooses from, and which layouts take them.

(D7)  orders: schedules whose partition and recomputation are searched (`BOUNDED`), and those that take the stage map
      of `stage_maps.dealt`: with several stages per rank, up to `MOST_VIRTUAL_STAGES`, or with a split backward;
      where the job names it, also an order that is made for these stages (`stage_maps.synthesized`). Under these
      all layers recompute alike, or, where backwards are full, as few as the memory asks
      (`stage_maps.dealt_recompute`)                                                                   -> orders()

Schedules whose actions overlap in pairs are left out: the executor runs the two one after the other, so the time that
a simulation promises would not be met.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from planner.cost import Workload
from planner.errors import LayoutError, UnknownNameError, UnsupportedError
from planner.schedule import (
    Requirement,
    build,
    canonical_name,
    find,
    names,
    requirements,
)
from planner.schedule.entry import Shape
from planner.schedule.order_bound import SPLIT
from planner.schedule.synthesize import MOST_ACTIONS
from planner.schedule.synthesized import NAME
from planner.search.bounds.layout import BOUNDED
from planner.search.layouts.chunks import CHUNKED, Rows
from planner.search.layouts.standing import Standing
from planner.search.queries.phrases import constraint_text
from planner.spec.job import Constraint, Range
from planner.spec.layout import RecomputeWord
from planner.spec.profile import RecomputeMode

MOST_VIRTUAL_STAGES = 8
"""On one rank."""
_LEAN = ("hanayo", "interleaved-memory-optimised")
"""They hold less in flight and take longer: recomputing few layers under another schedule mostly gains more."""
MOST_MIXED_STAGES = 4
"""On one rank, where layers are dealt and recompute per layer: more of them leave few layers each to choose among."""
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


def _dealt_schedules() -> tuple[str, ...]:
    """Schedules of the space besides the bounded ones."""
    entries = [find(name) for name in names(runnable_only=True) if name not in BOUNDED]
    return tuple(
        one.name
        for one in entries
        if not (
            one.has_pairs
            or one.recompute_modes
            or one.needs_durations
            or one.name in CHUNKED
        )
    )


DEALT = _dealt_schedules()
SEARCHED = (*BOUNDED, *DEALT, *CHUNKED)
"""Schedules that the search chooses from."""
SYNTHESIZED = NAME
"""The order that is made for the stages of a layout."""
ON_REQUEST = (*SEARCHED, SYNTHESIZED)
"""Those that a job may name. The best order of a long step cannot be proven, and would leave every search open."""


@dataclass(frozen=True, slots=True)
class Order:
    """In which order the micro-batches run, and on how many stages."""

    schedule: str
    virtual_stages: int
    recompute: RecomputeWord
    """``per-layer``: the stage map says, searched or by a rule; else the mode of all layers."""

    @property
    def is_dealt(self) -> bool:
        """Its stage map is dealt, not searched."""
        return self.schedule not in BOUNDED


def schedules_of(constraint: Constraint | None) -> tuple[str, ...]:
    """Canonical names of the schedules that a constraint permits."""
    if constraint is None:
        return SEARCHED
    values = constraint if isinstance(constraint, tuple) else (constraint,)
    if isinstance(constraint, Range) or not all(
        isinstance(value, str) for value in values
    ):
        raise UnknownNameError(
            f"{constraint_text(constraint)} is no schedule.",
            field="job.constraints.schedule",
            hint=f"use one of {', '.join(ON_REQUEST)}.",
        )
    wanted = tuple(dict.fromkeys(canonical_name(str(value)) for value in values))
    unable = [name for name in wanted if name not in ON_REQUEST]
    if unable:
        raise UnsupportedError(
            f"the search does not choose the schedule {unable[0]!r}.",
            field="job.constraints.schedule",
            hint=f"use one of {', '.join(ON_REQUEST)}; `planner predict` prices a layout with any other.",
        )
    return wanted


def recompute_wish(constraint: Constraint | None) -> tuple[str, ...]:
    """Recompute modes that the job permits."""
    if constraint is None or isinstance(constraint, Range):
        return ("per-layer",)
    return (
        tuple(map(str, constraint))
        if isinstance(constraint, tuple)
        else (str(constraint),)
    )


def orders_of(
    work: Workload,
    pipeline: int,
    standing: Standing,
    chunks: int,
    schedules: tuple[str, ...],
    virtual: tuple[int, ...],
    modes: tuple[RecomputeWord, ...],
) -> tuple[Order, ...]:
    """Orders of a family: where replicas differ the bounded schedules alone, with all layers recomputed alike, since
    what is cheapest may differ between their devices; for that reason the dealt ones recompute alike on a heterogeneous
    cluster, too, and no order is made for its stages."""
    count = len(work.profile.layers)
    if not work.groups and standing.are_alike:
        named = tuple(name for name in schedules if (name in CHUNKED) == (chunks > 1))
        return orders(
            pipeline, standing.micro_batches, count, named, virtual, modes, chunks
        )
    alike = tuple(mode for mode in modes if mode != "per-layer")
    bounded = tuple(name for name in schedules if name in BOUNDED)
    found = orders(pipeline, standing.micro_batches, count, bounded, virtual, modes)
    if standing.are_alike:
        dealt = tuple(name for name in schedules if name in DEALT)
        return found + orders(
            pipeline, standing.micro_batches, count, dealt, virtual, alike
        )
    return tuple(
        Order(one.schedule, one.virtual_stages, mode) for one in found for mode in alike
    )


def recompute_words(rows: Rows, wish: tuple[str, ...]) -> tuple[RecomputeWord, ...]:
    """Modes that all layers can take alike, and ``per-layer`` where some layer has a choice."""
    kinds = {id(options): frozenset(options) for options in rows}.values()
    choices = [
        options if "per-layer" in wish else options.intersection(wish)
        for options in kinds
    ]
    mixed: tuple[RecomputeWord, ...] = (
        ("per-layer",) if max(map(len, choices)) > 1 else ()
    )
    return (*_uniform_modes(kinds, wish), *mixed)


def _uniform_modes(
    kinds: Collection[frozenset[RecomputeMode]], wish: tuple[str, ...]
) -> tuple[RecomputeMode, ...]:
    """Each layer takes it, or offers no wished mode and keeps what it has."""
    offered = frozenset[RecomputeMode]().union(*kinds)
    wished = offered if "per-layer" in wish else offered.intersection(wish)
    if "per-layer" in wish or not wished:
        return tuple(mode for mode in MODES if mode in offered)
    return tuple(
        mode
        for mode in MODES
        if mode in wished and all(mode in each or not wished & each for each in kinds)
    )


@lru_cache(maxsize=4096)
def orders(
    pipeline: int,
    micro_batches: int,
    layers: int,
    schedules: tuple[str, ...],
    virtual: tuple[int, ...],
    modes: tuple[RecomputeWord, ...],
    chunks: int = 1,
) -> tuple[Order, ...]:
    """Orders that so many ranks, micro-batches, layers and sequence chunks can take: equations (D4) and (D7)."""
    found = [
        Order(name, 1, "per-layer")
        for name in schedules
        if name in BOUNDED and 1 in virtual
    ]
    for name in schedules:
        if name in BOUNDED or pipeline == 1:
            continue
        found += [
            Order(name, count, mode)
            for count in virtual
            if pipeline * count <= layers
            and _takes(name, Shape(pipeline, micro_batches, count, chunks))
            for mode in modes
            if _recomputes(name, count, mode)
        ]
    return tuple(found) if pipeline <= layers else ()


def _recomputes(name: str, virtual_stages: int, word: RecomputeWord) -> bool:
    """May layers that are dealt recompute like this?"""
    if word == "per-layer":
        is_open = name not in (SYNTHESIZED, *_LEAN) and not splits_backward(name)
        return is_open and virtual_stages <= MOST_MIXED_STAGES
    return word == "none" or name == SYNTHESIZED or not splits_backward(name)


@lru_cache
def splits_backward(name: str) -> bool:
    """Does a schedule split its backwards, or may it? The executor recomputes under full backwards only."""
    if name == SYNTHESIZED:
        return True
    small = build(
        name, ranks=2, micro_batches=4, virtual_stages=find(name).least_virtual_stages
    )
    return Requirement.SPLIT_BACKWARD in requirements(small)


def _takes(name: str, shape: Shape) -> bool:
    entry = find(name)
    if not entry.takes_virtual_stages(shape.virtual_stages):
        return False
    if name == SYNTHESIZED:
        return len(SPLIT) * shape.units <= MOST_ACTIONS
    try:
        entry.check(shape)
    except LayoutError:
        return False
    return True
