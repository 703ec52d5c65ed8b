"""Answers that a client may keep: strong ETags, 304 and 412 (RFC 9110, section 13)."""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import Request, Response

from planner.api.errors import PreconditionError

FOREVER = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "You have it already."}
}
"""For operations that are `cacheable`, in the OpenAPI document."""


def cacheable(
    request: Request,
    content: str,
    *,
    media_type: str,
    cache_control: str,
    location: str = "",
) -> Response:
    """The content with its ETag (sha256 of the bytes), or 304 when the client has it already.

    Raises:
        PreconditionError: the client wants it in another state only.
    """
    body = content.encode()
    tag = tag_of(body)
    check_if_match(request, tag)
    headers = {"ETag": tag, "Cache-Control": cache_control}
    if location:
        headers["Content-Location"] = location
    if _matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def tag_of(body: bytes) -> str:
    """The strong ETag of a content."""
    return f'"{hashlib.sha256(body).hexdigest()}"'


def check_if_match(request: Request, tag: str) -> None:
    """Hold a resource's ETag against ``If-Match``, where the request has one (strong comparison).

    Raises:
        PreconditionError: none of the client's tags is this one.
    """
    header = request.headers.get("if-match")
    if header is None or any(each.strip() in (tag, "*") for each in header.split(",")):
        return
    raise PreconditionError(
        f"the resource's ETag is {tag}.",
        field="If-Match",
        hint="GET it again, and look at what has changed.",
    )


def _matches(header: str, tag: str) -> bool:
    given = [each.strip().removeprefix("W/") for each in header.split(",")]
    return tag in given or "*" in given
