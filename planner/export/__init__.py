"""The same plan for other runtimes and launchers: one file per target, plan -> text."""

from planner.errors import UnknownNameError
from planner.export import pipelining
from planner.export.target import Export, Target

TARGETS: dict[str, Target] = {module.TARGET.name: module.TARGET for module in (pipelining,)}
"""By name; one file of this package each."""


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


__all__ = ["TARGETS", "Export", "Target", "find"]
