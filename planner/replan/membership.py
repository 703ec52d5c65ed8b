"""The nodes that take part in a run, under the name that this package uses."""

from __future__ import annotations

from planner.executor.elastic.roster import (
    ANY_GROUP,
    KnownPlans,
    check_groups,
    group_of_node,
    kinds,
)
from planner.executor.elastic.roster import Roster as Membership

__all__ = [
    "ANY_GROUP",
    "KnownPlans",
    "Membership",
    "check_groups",
    "group_of_node",
    "kinds",
]
