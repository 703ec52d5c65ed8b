"""Pages for browsers: no script, no external resource, every value escaped."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from planner.api.pages import catalogue, form, job, plan, problem, reference, start
from planner.api.pages.problem import problem_page

__all__ = ["problem_page", "router"]

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
for each in (start, plan, form, job, catalogue, problem, reference):
    router.include_router(each.router)
