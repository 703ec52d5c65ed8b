"""`planner check`: recomputes a plan from its profile, cluster and layout, by code that the search does not use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from planner.cli.arguments import add_json
from planner.cli.console import data, to_json
from planner.cli.failures import DONE, FAILED
from planner.cli.inputs import profile_behind
from planner.spec import Plan, read

if TYPE_CHECKING:
    from planner.validate import CheckReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("plan", metavar="plan.json", help="plan to check ('-': stdin)")
    parser.add_argument("--profile", metavar="FILE", help="profile of the plan, when the plan does not carry it")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was checked; exit 1 when the plan does not hold."""
    plan = read(Plan, arguments.plan)
    profile = profile_behind(plan, arguments.profile)
    from planner.validate import check

    report = check(plan, profile)
    if arguments.json:
        document = {"ok": report.ok, "problems": list(report.problems), "checked": list(report.checked)}
        data(to_json({"plan": plan.id, **document}))
    else:
        data(_text(plan, report))
    return DONE if report.ok else FAILED


def _text(plan: Plan, report: CheckReport) -> str:
    lines = [f"checked  {what}" for what in report.checked]
    lines += [f"WRONG    {problem}" for problem in report.problems]
    verdict = "holds" if report.ok else f"does not hold: {len(report.problems)} problem(s)"
    return "\n".join([*lines, f"plan {plan.id[:12]} {verdict}"])
