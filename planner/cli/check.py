"""`planner check`: recomputes a plan from its profile, cluster and layout, by code that the search does not use."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from planner.cli.arguments import add_json
from planner.cli.console import Progress, data, table, to_json
from planner.cli.failures import DONE, FAILED
from planner.cli.inputs import profile_behind
from planner.cli.run import model_of
from planner.errors import DocumentError
from planner.spec import Plan, read

if TYPE_CHECKING:
    from planner.executor.dry_run import DryRank, DryRun
    from planner.validate import CheckReport


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("plan", metavar="plan.json", help="plan to check ('-': stdin)")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="profile of the plan, when the plan does not carry it",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build every rank without its device, and compare what it holds",
    )
    parser.add_argument(
        "--model",
        help="of the dry run: catalogue name, config.json, or package.module:callable (default: the plan's)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what was checked; exit 1 when the plan does not hold."""
    if arguments.model is not None and not arguments.dry_run:
        raise DocumentError(
            "is for --dry-run only.",
            field="--model",
            hint="give --dry-run too, or leave it out.",
        )
    plan = read(Plan, arguments.plan)
    model = arguments.model or model_of(plan) if arguments.dry_run else None
    profile = profile_behind(plan, arguments.profile)
    from planner.validate import check

    report = check(plan, profile)
    dry = _dry_run(plan, model) if model is not None else None
    if arguments.json:
        document = {
            "ok": report.ok,
            "problems": list(report.problems),
            "checked": list(report.checked),
        }
        data(
            to_json(
                {
                    "plan": plan.id,
                    **document,
                    **({} if dry is None else {"dry_run": _document(dry)}),
                }
            )
        )
    else:
        data(_text(plan, report))
        if dry is not None:
            data(_dry_text(plan, dry))
    return DONE if report.ok and (dry is None or not dry.differences) else FAILED


def _text(plan: Plan, report: CheckReport) -> str:
    lines = [f"checked  {what}" for what in report.checked]
    lines += [f"WRONG    {problem}" for problem in report.problems]
    verdict = (
        "holds" if report.ok else f"does not hold: {len(report.problems)} problem(s)"
    )
    return "\n".join([*lines, f"plan {plan.id[:12]} {verdict}"])


def _dry_run(plan: Plan, model: str) -> DryRun:
    from planner.executor.dry_run import dry_run
    from planner.profiler.models import load_model

    with Progress("building ranks") as progress:
        return dry_run(plan, load_model(model), progress=progress.update)


def _document(dry: DryRun) -> dict[str, Any]:
    from planner.executor.dry_run import COMPARED

    rows = [
        {
            "ranks": list(rank.ranks),
            "pipeline": rank.built.pipeline,
            "parameters": rank.built.parameters,
            **{name: getattr(rank.built, name) for name in COMPARED},
            "predicted": {name: getattr(rank.predicted, name) for name in COMPARED}
            if rank.predicted
            else None,
            "differences": list(rank.differences),
        }
        for rank in dry.ranks
    ]
    return {"ok": not dry.differences, "problems": list(dry.differences), "ranks": rows}


def _dry_text(plan: Plan, dry: DryRun) -> str:
    header = (
        "ranks",
        "pipeline rank",
        "parameters",
        "parameter bytes",
        "gradient bytes",
        "optimizer bytes",
    )
    names, offloads = (
        (*header, "states on the host"),
        any(rank.built.host_bytes for rank in dry.ranks),
    )
    columns = len(header) + offloads
    lines = [table(names[:columns], [_row(rank)[:columns] for rank in dry.ranks])]
    lines += [f"WRONG    {difference}" for difference in dry.differences]
    ranks = len(plan.placement)
    verdict = (
        "as predicted"
        if not dry.differences
        else f"not as predicted: {len(dry.differences)} difference(s)"
    )
    return "\n".join([*lines, f"dry run of {ranks} rank(s): {verdict}"])


def _row(rank: DryRank) -> tuple[str, ...]:
    from planner.executor.dry_run import COMPARED

    first, last, count = rank.ranks[0], rank.ranks[-1], len(rank.ranks)
    named = str(first) if count == 1 else f"{first}..{last} ({count})"
    built = rank.built
    figures = (built.parameters, *(getattr(built, name) for name in COMPARED))
    return (named, str(built.pipeline), *(f"{figure:,}" for figure in figures))
