"""Two plans side by side: figures, changed fields, stage maps and memory."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse
from pydantic import JsonValue

from planner.api.dependencies import ServicesDependency, stored_result
from planner.api.pages.plan import plan_context
from planner.api.pages.rendering import page
from planner.spec import Plan
from planner.spec.plan_diff import PlanDiff, plan_diff

router = APIRouter()

OFFERED_PLANS = 50


@router.get("/compare")
def compare(
    request: Request,
    parts: ServicesDependency,
    left: Annotated[str | None, Query()] = None,
    right: Annotated[str | None, Query()] = None,
) -> HTMLResponse:
    """Two plans, or a list to choose them from."""
    recent = parts.store.plans(before=None, limit=OFFERED_PLANS)
    offered = [row for row in recent if row.status == "succeeded"]
    chosen: dict[str, Any] = {"offered": offered, "left": left, "right": right}
    if not left or not right:
        return page(request, "compare.html", **chosen, sides=None)
    results = [stored_result(plan_id, parts) for plan_id in (left, right)]
    first, second = (result.plan() for result in results)
    models = [result.row.model for result in results]
    found = plan_diff(first, second)
    return page(
        request,
        "compare.html",
        **chosen,
        sides=[plan_context(first, models[0]), plan_context(second, models[1])],
        differences=_differences(found, first, second),
        changes=[
            (each.field, _text(each.value), _text(each.other)) for each in found.changes
        ],
        left_out=found.left_out,
    )


def _differences(found: PlanDiff, first: Plan, second: Plan) -> dict[str, float | None]:
    """Relative change by the caption of a figure; None: not comparable.

    The page shows the throughput of one device, where `plan_diff` has that of all.
    """
    changes = {each.name: each.change for each in found.figures}
    throughput = changes["tokens_per_second"]
    if throughput is not None:
        ratio = len(first.placement) / len(second.placement)
        throughput = (1 + throughput) * ratio - 1
    return {
        "Step time": changes["step_seconds"],
        "Throughput": throughput,
        "MFU": changes["mfu"],
        "Memory": changes["peak_bytes"],
    }


def _text(value: JsonValue) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
