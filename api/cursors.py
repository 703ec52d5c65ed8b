"""Cursors of the list of plans: opaque to clients, so that what they mean may change."""

from __future__ import annotations

import base64
import binascii

from planner.errors import DocumentError


def cursor_of(number: int) -> str:
    """The cursor of the page that begins after a plan's number."""
    return base64.urlsafe_b64encode(f"before {number}".encode()).decode()


def number_of(cursor: str | None) -> int | None:
    """The number that a cursor stands for; None is the first page.

    Raises:
        DocumentError: it is no cursor.
    """
    if cursor is None:
        return None
    try:
        return int(
            base64.urlsafe_b64decode(cursor).decode("ascii").removeprefix("before ")
        )
    except (ValueError, binascii.Error):
        raise DocumentError(
            f"{cursor!r} is no cursor.",
            field="cursor",
            hint="send the `next` of the page before, or leave it out.",
        ) from None
