"""Cursors of the list of plans, which are opaque to clients."""

from __future__ import annotations

import base64
import binascii
import re

from planner.errors import DocumentError

CONTENT = re.compile(rb"before ([1-9][0-9]{0,17})")


def cursor_of(number: int) -> str:
    """The cursor of the page after the plan with this number."""
    return base64.urlsafe_b64encode(f"before {number}".encode()).decode()


def number_of(cursor: str | None) -> int | None:
    """The number in a cursor, within 64 bits; None for the first page.

    Raises:
        DocumentError: the text is not a cursor.
    """
    if cursor is None:
        return None
    try:
        content = base64.urlsafe_b64decode(cursor)
    except (ValueError, binascii.Error):
        content = b""
    found = CONTENT.fullmatch(content)
    if found is None:
        raise DocumentError(
            f"{cursor!r} is not a cursor.",
            field="cursor",
            hint="send the `next` of the previous page, or no cursor.",
        )
    return int(found[1])
