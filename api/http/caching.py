"""Cacheable responses: strong ETags, 304 and 412 (RFC 9110, section 13)."""

from __future__ import annotations

import gzip
import hashlib
from typing import Any

from fastapi import Request, Response

from planner.api.errors import PreconditionError

FOREVER = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"
GZIP_LEVEL = 5
NOT_MODIFIED: dict[int | str, dict[str, Any]] = {
    304: {"description": "The client has the current version."}
}
"""Response of `cacheable` operations, for the OpenAPI document."""


def cacheable(
    request: Request,
    content: str,
    *,
    media_type: str,
    cache_control: str,
    location: str = "",
    is_large: bool = False,
) -> Response:
    """The content with its ETag (sha256 of the bytes), or 304 if the client has it.

    Large content is compressed for clients that accept gzip.

    Raises:
        PreconditionError: the content does not match ``If-Match``.
    """
    body = content.encode()
    headers = {"Cache-Control": cache_control}
    if is_large:
        headers["Vary"] = "Accept-Encoding"
    if is_large and _accepts_gzip(request):
        body = gzip.compress(body, compresslevel=GZIP_LEVEL, mtime=0)
        headers["Content-Encoding"] = "gzip"
    tag = tag_of(body)
    check_if_match(request, tag)
    headers["ETag"] = tag
    if location:
        headers["Content-Location"] = location
    if matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def _accepts_gzip(request: Request) -> bool:
    """Whether the client accepts gzip (RFC 9110, section 12.5.3)."""
    for item in request.headers.get("accept-encoding", "").split(","):
        coding, _, weight = item.partition(";")
        if coding.strip().lower() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def tag_of(body: bytes) -> str:
    """The strong ETag of a content."""
    return f'"{hashlib.sha256(body).hexdigest()}"'


def check_if_match(request: Request, tag: str) -> None:
    """Compare a resource's ETag with the header ``If-Match``, if present.

    Raises:
        PreconditionError: the ETag is none of those in the header.
    """
    header = request.headers.get("if-match")
    if header is None or any(each.strip() in (tag, "*") for each in header.split(",")):
        return
    raise PreconditionError(
        f"the resource's ETag is {tag}.",
        field="If-Match",
        hint="read the resource again.",
    )


def matches(header: str, tag: str) -> bool:
    """Whether a header ``If-None-Match`` has the ETag."""
    tags = [each.strip().removeprefix("W/") for each in header.split(",")]
    return tag in tags or "*" in tags
