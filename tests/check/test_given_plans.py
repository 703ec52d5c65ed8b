"""Plans of any layout hold, and no number in them can be changed without being found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.errors import DocumentError
from planner.search import plan_layout
from planner.spec import Plan
from planner.spec.document import parse
from tests.builders import request
from tests.check.instances import Given, given_layouts
from tests.check.mixed_instances import layouts_of_equal_replicas, mixed_layouts

UNCHECKED = {
    ("search", "seconds"),
    *(("search", f"layouts_{what}") for what in ("considered", "pruned", "solved")),
}
"""Counts and seconds of the search, which cannot be recomputed."""
Place = tuple[str | int, ...]


def planned(instance: Given) -> Plan:
    """The plan of the layout."""
    asked = request(instance.profile, instance.cluster, instance.job)
    found = plan_layout(asked, instance.profile, instance.layout)
    assert isinstance(found, Plan)
    return found


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(given_layouts())
def test_plans_of_any_layout_are_valid(instance: Given) -> None:
    """All dimensions, all schedules that a plan can have: every number is the recomputed one."""
    assert check(planned(instance), instance.profile).problems == ()


def numbers(part: Any, place: Place = ()) -> Iterator[Place]:
    """Where numbers stand in a document; in the actions, which are texts, every action."""
    if isinstance(part, dict):
        for name, value in part.items():
            yield from numbers(value, (*place, name))
    elif isinstance(part, list):
        for index, value in enumerate(part):
            yield from numbers(value, (*place, index))
    elif (isinstance(part, int | float) and not isinstance(part, bool)) or place[
        :1
    ] == ("actions",):
        yield place


def changed(value: Any, step_seconds: float, up: bool) -> Any:
    """Another value: a whole number by one, seconds and ratios by a thousandth, an action's micro-batch by one."""
    if isinstance(value, str):
        return re.sub(r"\d+$", lambda found: str(int(found[0]) + 1), value)
    if isinstance(value, int):
        return value + (1 if up else -1)
    return value * (1.001 if up else 0.999) or step_seconds / 1000


@settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(mixed_layouts())
def test_plans_on_groups_that_differ_are_valid(instance: Given) -> None:
    """Up to three node groups, both orders of the ranks, shares: every number is the recomputed one."""
    assert check(planned(instance), instance.profile).problems == ()


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(layouts_of_equal_replicas())
def test_plans_of_equal_replicas_on_groups_that_differ_are_valid(
    instance: Given,
) -> None:
    """Every schedule, several stages per rank, split backwards: every number is the recomputed one."""
    assert check(planned(instance), instance.profile).problems == ()


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(given_layouts() | mixed_layouts() | layouts_of_equal_replicas(), st.data())
def test_no_number_can_be_changed(instance: Given, data: st.DataObject) -> None:
    """One number of a plan, drawn from all of them, is changed: the check finds it, or the plan cannot be read."""
    found = planned(instance)
    document = found.to_json()
    heads = [
        head
        for head in document
        if head not in ("schema_version", "alternatives", "explanation")
    ]
    head = data.draw(st.sampled_from(heads))
    skipped = set(UNCHECKED)
    if len(instance.cluster.node_groups) > 1:  # any number of parts may be considered
        skipped.add(("search", "clusters_considered"))
    places = [
        place for place in numbers(document[head], (head,)) if place[:2] not in skipped
    ]
    assume(places)
    *path, last = data.draw(st.sampled_from(places))
    part: Any = document
    for name in path:
        part = part[name]
    before = part[last]
    part[last] = changed(
        before, found.prediction.step_seconds, data.draw(st.booleans())
    )
    try:
        altered = parse(Plan, document)
    except DocumentError:
        return
    assert check(altered, instance.profile).problems
