"""An independent check of plans: shares documents with the planner, but no cost model."""

from planner.check.plan_check import check
from planner.check.report import CheckReport

__all__ = ["CheckReport", "check"]
