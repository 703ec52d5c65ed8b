"""The searched values of every dimension, as the plan reports them."""

from __future__ import annotations

from planner.search.engine.dimensions import searched_dimensions
from planner.search.engine.engine import Search
from planner.spec.plan import LeftOutValues, SpaceDimension


def space_report(search: Search) -> tuple[SpaceDimension, ...]:
    """Return the values that a search covers, and those it leaves out with a reason."""
    found = []
    for dimension in searched_dimensions(search.options, search.table):
        left_out = tuple(
            LeftOutValues(values=each.values, reason=each.reason)
            for each in dimension.left_out
        )
        found.append(
            SpaceDimension(
                field=dimension.field, searched=dimension.searched, left_out=left_out
            )
        )
    return tuple(found)


def joined_space(
    first: tuple[SpaceDimension, ...], second: tuple[SpaceDimension, ...]
) -> tuple[SpaceDimension, ...]:
    """Return the dimensions of two searches, with the values that either covers.

    Args:
        first: of one search.
        second: of another search of the same request; what it leaves out is left out.
    """
    known = {one.field: one.searched for one in first}
    found = []
    for one in second:
        values = dict.fromkeys((*known.get(one.field, ()), *one.searched))
        found.append(one.model_copy(update={"searched": tuple(values)}))
    return tuple(found)
