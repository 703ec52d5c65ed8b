"""The check of a plan, from its documents to its proof."""

from __future__ import annotations

from planner.check.actions import check_actions
from planner.check.context import Context
from planner.check.prediction import check_prediction
from planner.check.proof import check_alternatives, check_answers, check_search
from planner.check.report import CheckReport, Findings
from planner.check.structure import (
    check_differences,
    check_documents,
    check_layout,
    check_placement,
    check_stages,
)
from planner.errors import DocumentError
from planner.spec.plan import Plan
from planner.spec.profile import ModelProfile


def check(plan: Plan, profile: ModelProfile | None = None) -> CheckReport:
    """Recompute a plan from its request and profile, and compare.

    The structure is checked only if the documents match, and time and memory are
    recomputed only if the structure is right.

    Args:
        plan: the plan.
        profile: the one that the plan was made from; None: the one in its request.

    Raises:
        UnknownNameError, DocumentError: the profile, a device or a link is unknown.
    """
    profile = profile or plan.request.profile
    if profile is None:
        raise DocumentError(
            "is missing: the plan does not contain it.",
            field="profile",
            hint="give the profile that the plan was made from.",
        )
    findings = Findings()
    context = Context.of(plan, profile)
    if check_documents(plan, context, findings):
        check_layout(plan, context, findings)
        check_placement(plan, context, findings)
        check_stages(plan, context, findings)
        check_actions(plan, context, findings)
        if not findings.problems:
            check_differences(context, findings)
        if not findings.problems:
            check_prediction(plan, context, findings)
    check_search(plan, findings)
    check_alternatives(plan, context, findings)
    check_answers(plan, context, findings)
    return findings.report()
