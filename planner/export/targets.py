"""All targets, by name."""

from __future__ import annotations

from planner.errors import UnknownNameError
from planner.export import pipelining
from planner.export.target import Target

TARGETS: dict[str, Target] = {module.TARGET.name: module.TARGET for module in (pipelining,)}
"""In the order in which they are listed."""


def find(name: str) -> Target:
    """The target of a name.

    Raises:
        UnknownNameError: there is none.
    """
    if name in TARGETS:
        return TARGETS[name]
    raise UnknownNameError(
        f"there is no export target {name!r}.", field="target", mend=f"targets: {', '.join(sorted(TARGETS))}."
    )
