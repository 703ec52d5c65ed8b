"""Cursors of the list of plans, which are opaque to clients."""

from __future__ import annotations

import base64
import binascii

from planner.errors import DocumentError


def cursor_of(number: int) -> str:
    """The cursor of the page after the plan with this number."""
    return base64.urlsafe_b64encode(f"before {number}".encode()).decode()


def number_of(cursor: str | None) -> int | None:
    """The number in a cursor; None for the first page.

    Raises:
        DocumentError: the text is not a cursor.
    """
    if cursor is None:
        return None
    try:
        return int(
            base64.urlsafe_b64decode(cursor).decode("ascii").removeprefix("before ")
        )
    except (ValueError, binascii.Error):
        raise DocumentError(
            f"{cursor!r} is not a cursor.",
            field="cursor",
            hint="send the `next` of the previous page, or no cursor.",
        ) from None
