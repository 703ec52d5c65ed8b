"""Pages for browsers: Jinja templates, one style sheet, one script, no other site."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from planner.api.pages import (
    catalogue,
    compare,
    jobs,
    plan,
    problem,
    reference,
    runs,
    start,
    static_files,
)
from planner.api.pages.plan import standalone_page
from planner.api.pages.problem import problem_page

__all__ = ["problem_page", "router", "standalone_page"]

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
for each in (
    *(start, plan, jobs, compare, runs),
    *(catalogue, problem, reference, static_files),
):
    router.include_router(each.router)
