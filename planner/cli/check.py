"""`planner check`: recompute a plan by code that the search does not use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.cli.console import Progress, data, table, to_json
from planner.cli.failures import DONE, FAILED
from planner.cli.options import option, plan_argument, refuse, verb
from planner.errors import DocumentError
from planner.profiler.resolve import profile_behind
from planner.spec import Plan, read
from planner.spec.units import seconds
from planner.spec.words import counted

if TYPE_CHECKING:
    from planner.check import CheckReport
    from planner.executor.dry_run import DryRank, DryRun

MOST_PROBLEMS = 6
"""Problems that are printed without --full."""


@verb("check")
@plan_argument
@option("--profile", metavar="FILE", help="Profile of a plan that does not carry it")
@option(
    "--dry-run", is_flag=True, help="Build every rank without its device, and compare"
)
@option("--model", metavar="MODEL", help="Model of the dry run [default: the plan's]")
@option("--full", is_flag=True, help="Print every check")
def command(
    plan_path: str,
    profile: str | None,
    dry_run: bool,
    model: str | None,
    full: bool,
    as_json: bool,
) -> int:
    """Recompute a plan independently and validate it; exit 1 if it is wrong.

    '-' reads the plan from stdin.
    """
    if not dry_run:
        refuse(
            {"--model": model},
            "needs --dry-run.",
            "pass --dry-run, or leave OPTION out.",
        )
    plan = read(Plan, plan_path)
    from planner.check import check

    report = check(plan, profile_behind(plan, profile))
    built = _dry_run(plan, model or model_of(plan)) if dry_run else None
    if as_json:
        data(to_json(_document(plan, report, built)))
    else:
        data(_text(plan, report, full))
        if built is not None:
            data(_dry_text(plan, built))
    is_right = report.ok and (built is None or not built.differences)
    return DONE if is_right else FAILED


def model_of(plan: Plan) -> str:
    """Reference of the model that a plan was made for.

    Raises:
        DocumentError: the plan was made from a profile.
    """
    if plan.request.model is None:
        raise DocumentError(
            "is missing: the plan was made from a profile, which does not name its model.",
            field="--model",
            hint="give the model that was profiled.",
        )
    return plan.request.model


def _dry_run(plan: Plan, model: str) -> DryRun:
    from planner.executor.dry_run import dry_run
    from planner.profiler.models import load_model

    with Progress("building ranks") as progress:
        return dry_run(plan, load_model(model), progress=progress.update)


def _text(plan: Plan, report: CheckReport, full: bool) -> str:
    lines = [f"checked  {what}" for what in report.checked] if full else []
    shown = report.problems if full else report.problems[:MOST_PROBLEMS]
    lines += [f"wrong    {problem}" for problem in shown]
    hidden = len(report.problems) - len(shown)
    if hidden:
        lines.append(f"         {hidden} more: --full")
    name = f"Plan {plan.id[:12]}"
    if not report.ok:
        lines.append(f"{name} is wrong: {counted(len(report.problems), 'problem')}.")
        return "\n".join(lines)
    step = seconds(plan.prediction.step_seconds)
    lines.append(
        f"{name} is valid: {counted(len(report.checked), 'check')} passed, "
        f"{step} per step on {counted(len(plan.placement), 'device')}."
    )
    return "\n".join(lines)


def _document(plan: Plan, report: CheckReport, dry: DryRun | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "plan": plan.id,
        "ok": report.ok,
        "problems": list(report.problems),
        "checked": list(report.checked),
    }
    if dry is not None:
        document["dry_run"] = {
            "ok": not dry.differences,
            "problems": list(dry.differences),
            "ranks": [_rank_document(rank) for rank in dry.ranks],
        }
    return document


def _rank_document(rank: DryRank) -> dict[str, Any]:
    from planner.executor.dry_run import COMPARED

    predicted = rank.predicted
    return {
        "ranks": list(rank.ranks),
        "pipeline": rank.built.pipeline,
        "parameters": rank.built.parameters,
        **{name: getattr(rank.built, name) for name in COMPARED},
        "predicted": {name: getattr(predicted, name) for name in COMPARED}
        if predicted
        else None,
        "differences": list(rank.differences),
    }


def _dry_text(plan: Plan, dry: DryRun) -> str:
    header = [
        "ranks",
        "pipeline rank",
        "parameters",
        "parameter bytes",
        "gradient bytes",
        "optimizer bytes",
    ]
    if any(rank.built.host_bytes for rank in dry.ranks):
        header.append("states on the host")
    rows = [_row(rank)[: len(header)] for rank in dry.ranks]
    lines = [table(header, rows)]
    lines += [f"wrong    {difference}" for difference in dry.differences]
    count = len(dry.differences)
    verdict = "as predicted" if not count else f"{counted(count, 'difference')}"
    lines.append(f"Dry run of {counted(len(plan.placement), 'rank')}: {verdict}.")
    return "\n".join(lines)


def _row(rank: DryRank) -> tuple[str, ...]:
    from planner.executor.dry_run import COMPARED

    first, last, count = rank.ranks[0], rank.ranks[-1], len(rank.ranks)
    name = str(first) if count == 1 else f"{first}..{last} ({count})"
    built = rank.built
    figures = (built.parameters, *(getattr(built, field) for field in COMPARED))
    return (name, str(built.pipeline), *(f"{figure:,}" for figure in figures))
