"""Answers that a client may keep: strong ETags and 304 (RFC 9110, section 13)."""

from __future__ import annotations

import hashlib

from fastapi import Request, Response

FOREVER = "public, max-age=31536000, immutable"
REVALIDATE = "no-cache"


def cacheable(request: Request, content: str, *, media_type: str, cache_control: str, location: str = "") -> Response:
    """The content with its ETag (sha256 of the bytes), or 304 when the client has it already."""
    body = content.encode()
    tag = f'"{hashlib.sha256(body).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": cache_control}
    if location:
        headers["Content-Location"] = location
    if _matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=media_type, headers=headers)


def _matches(header: str, tag: str) -> bool:
    given = [each.strip().removeprefix("W/") for each in header.split(",")]
    return tag in given or "*" in given
