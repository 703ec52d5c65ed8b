"""The difference of two stored plans."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from planner.api.dependencies import (
    ResultDependency,
    ServicesDependency,
    stored_result,
)
from planner.api.errors import NotFoundError
from planner.api.http.caching import NOT_MODIFIED, REVALIDATE, cacheable
from planner.spec.plan_diff import PlanDiff, plan_diff

router = APIRouter(prefix="/v1/plans", tags=["plans"])


@router.get("/{plan_id}/diff", response_model=PlanDiff, responses=NOT_MODIFIED)
def get_diff(
    other: Annotated[str, Query(description="Id of the other plan.")],
    request: Request,
    result: ResultDependency,
    parts: ServicesDependency,
) -> Response:
    """Return the fields that differ from another plan, and both plans' step time,
    throughput, MFU and memory.
    """
    try:
        second = stored_result(other, parts).plan()
    except NotFoundError as error:
        problem = error.problems[0]
        raise NotFoundError(problem.message, field="other", hint=problem.hint) from None
    found = plan_diff(result.plan(), second)
    return cacheable(
        request,
        found.model_dump_json(),
        media_type="application/json",
        cache_control=REVALIDATE,
    )
