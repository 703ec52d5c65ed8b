"""Checks plans by recomputing them: shares the documents with the planner, and no line of its cost model or search."""

from planner.validate.findings import CheckReport
from planner.validate.plan_check import check

__all__ = ["CheckReport", "check"]
