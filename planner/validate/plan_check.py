"""The way of a check: documents -> layout -> placement -> stages -> actions -> prices -> proof."""

from __future__ import annotations

from planner.spec.plan import Plan
from planner.spec.profile import ModelProfile
from planner.validate.actions import check_actions
from planner.validate.answers import check_answers
from planner.validate.certainty import check_certainty
from planner.validate.documents import check_documents
from planner.validate.facts import facts_of
from planner.validate.findings import CheckReport, Findings
from planner.validate.offload import check_offload
from planner.validate.placement import check_placement
from planner.validate.prediction import check_prediction
from planner.validate.proof import check_alternatives, check_search
from planner.validate.stages import check_differences, check_layout, check_stages

_STRUCTURE = (
    check_layout,
    check_placement,
    check_stages,
    check_actions,
    check_differences,
    check_offload,
)


def check(plan: Plan, profile: ModelProfile) -> CheckReport:
    """Recompute a plan from its request and profile, and compare.

    Later steps stand on earlier ones: seconds and bytes are recomputed only when documents and structure hold.

    Args:
        plan: what to check.
        profile: the one that the plan was made from, by its digest.

    Raises:
        UnknownNameError, DocumentError: the plan's device or link is in no catalogue, so nothing can be priced.
    """
    findings = Findings()
    facts = facts_of(plan, profile)
    if check_documents(plan, facts, findings):
        for step in _STRUCTURE:
            step(plan, facts, findings)
        if not findings.problems:
            check_prediction(plan, facts, findings)
            check_certainty(plan, findings)
    check_search(plan, findings)
    check_alternatives(plan, facts, findings)
    check_answers(plan, facts, findings)
    return findings.report()
