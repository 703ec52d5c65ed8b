"""Two plans side by side: figures, changed fields, stage maps and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from planner.api.dependencies import ServicesDependency, stored_result
from planner.api.pages.plan import plan_context
from planner.api.pages.templates import page
from planner.spec import Plan
from planner.spec.words import written

router = APIRouter()

OFFERED_PLANS = 50
ABSENT = "none"


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
    plans = [result.plan() for result in results]
    sides = [
        plan_context(plan, result.row.model)
        for plan, result in zip(plans, results, strict=True)
    ]
    return page(
        request,
        "compare.html",
        **chosen,
        sides=sides,
        changes=_changes(*plans),
        differences=_differences(*plans),
    )


def _differences(left: Plan, right: Plan) -> dict[str, float | None]:
    """Relative change of every figure from left to right; None: not comparable."""
    return {
        "Step time": _relative(
            left.prediction.step_seconds, right.prediction.step_seconds
        ),
        "Throughput": _relative(_rate(left), _rate(right)),
        "MFU": _relative(left.prediction.mfu, right.prediction.mfu),
        "Memory": _relative(_peak(left), _peak(right)),
    }


def _rate(plan: Plan) -> float:
    return plan.prediction.tokens_per_second / len(plan.placement)


def _peak(plan: Plan) -> int:
    return max(rank.peak_bytes for rank in plan.prediction.memory)


def _relative(before: float | None, after: float | None) -> float | None:
    if not before or after is None:
        return None
    return after / before - 1


def _changes(left: Plan, right: Plan) -> list[tuple[str, str, str]]:
    """Fields of request and layout that differ, with both values."""
    before, after = _fields(left), _fields(right)
    names = [*before, *(name for name in after if name not in before)]
    values = ((name, before.get(name), after.get(name)) for name in names)
    return [
        (name, ABSENT if one is None else one, ABSENT if two is None else two)
        for name, one, two in values
        if one != two
    ]


def _fields(plan: Plan) -> dict[str, str]:
    """Values of request and layout as text, by their path."""
    named = {"profile", "profile_id"} if plan.request.model else {"profile"}
    asked = plan.request.model_dump(mode="json", by_alias=True, exclude=named)
    whole = {
        "request": asked,
        "layout": plan.layout.model_dump(mode="json"),
        "micro_batches": plan.micro_batches,
    }
    return dict(_flat(whole, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _flat(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _flat(each, f"{path}[{index}]")
    elif value is not None:
        yield path, f"{value:g}" if isinstance(value, float) else written(value)
