"""The same plan for other runtimes and launchers: one file per target, plan -> text."""

from planner.export.target import Export, Target
from planner.export.targets import TARGETS, find

__all__ = ["TARGETS", "Export", "Target", "find"]
