"""The style sheet and the script of the pages."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from planner.api.errors import NotFoundError
from planner.api.http.caching import REVALIDATE, cacheable
from planner.api.pages.rendering import static_text

router = APIRouter()

MEDIA_TYPES = {"planner.css": "text/css", "planner.js": "text/javascript"}


@router.get("/static/{name}")
def show_static(name: str, request: Request) -> Response:
    """A static file; browsers ask whether it has changed."""
    if name not in MEDIA_TYPES:
        raise NotFoundError(
            f"there is no file {name!r}.", hint=f"use one of {', '.join(MEDIA_TYPES)}."
        )
    response = cacheable(
        request,
        static_text(name),
        media_type=MEDIA_TYPES[name],
        cache_control=REVALIDATE,
    )
    response.headers["X-Content-Type-Options"] = "nosniff"
    return response
