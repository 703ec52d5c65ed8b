"""Downloads of a plan: its documents, and its exports for runtimes and launchers."""

from __future__ import annotations

from collections.abc import Iterator

from planner.api.pages.html import Node, bullets, link, table, tag
from planner.errors import PlannerError
from planner.export import TARGETS, Target
from planner.spec import Plan
from planner.spec.words import counted

PARTS = (
    ("", "plan.json", "the whole plan, for `planner check` and `planner run`"),
    ("/stage-map", "stage map", "the layers of every rank"),
    (
        "/explanation",
        "explanation",
        "why it is the best, and what the alternatives cost",
    ),
    (
        "/timeline.json",
        "timeline.json",
        "one predicted step as a trace, for ui.perfetto.dev",
    ),
    ("/timeline.svg", "timeline.svg", "one predicted step as a picture"),
)


def files(plan: Plan) -> Iterator[Node]:
    """Documents, then exports."""
    base = f"/v1/plans/{plan.id}"
    yield bullets(
        [link(f"{base}{path}", name), f": {what}"] for path, name, what in PARTS
    )
    rows = [_target(target, plan) for target in TARGETS.values()]
    if rows:
        yield table(
            "The plan for other runtimes and launchers",
            ("Target", "What it is", ""),
            rows,
        )


def _target(target: Target, plan: Plan) -> tuple[Node, Node, Node]:
    """A link to the export, or the reason why the target cannot run the plan."""
    try:
        export = target.write(plan)
    except PlannerError as error:
        return target.name, target.title, ["not supported: ", str(error)]
    name = link(f"/v1/plans/{plan.id}/exports/{target.name}", target.name)
    summary = tag(
        "summary", f"{counted(len(export.warnings), 'difference')} from the plan"
    )
    differences: Node = (
        tag("details", summary, bullets(export.warnings))
        if export.warnings
        else "as planned"
    )
    return name, f"{target.title} ({target.version})", differences
