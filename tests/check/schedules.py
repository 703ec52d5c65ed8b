"""Schedules that a plan can have, for every test that replays them."""

from __future__ import annotations

from functools import cache
from itertools import product

from hypothesis import strategies as st

from planner.check.schedules import SCHEDULES
from planner.errors import LayoutError
from planner.schedule import Schedule, build, find, names
from planner.schedule.entry import Shape as Numbers

PLANNABLE = tuple(
    name for name in names(fixed_only=True) if not SCHEDULES[name].refused
)


@cache
def numbers(name: str) -> tuple[Numbers, ...]:
    """Small numbers that the schedule takes."""
    entry = find(name)
    virtual = [each for each in range(1, 5) if entry.takes_virtual_stages(each)]
    chunks = (1, 2, 4) if entry.takes_sequence_chunks else (1,)
    every = (
        Numbers(*each) for each in product(range(1, 6), range(1, 13), virtual, chunks)
    )
    return tuple(shape for shape in every if _takes(name, shape))


def _takes(name: str, shape: Numbers) -> bool:
    try:
        find(name).check(shape)
    except LayoutError:
        return False
    return True


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule with one copy of each stage."""
    name = draw(st.sampled_from(PLANNABLE))
    shape = draw(st.sampled_from(numbers(name)))
    return build(
        name,
        ranks=shape.ranks,
        micro_batches=shape.micro_batches,
        virtual_stages=shape.virtual_stages,
        sequence_chunks=shape.sequence_chunks,
    )
