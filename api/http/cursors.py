"""Lists that are read in pages, by cursors which are opaque to clients."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from typing import Protocol, TypeVar

from planner.errors import DocumentError

CONTENT = re.compile(rb"before ([1-9][0-9]{0,17})")


class Numbered(Protocol):
    """A row of a list."""

    @property
    def number(self) -> int:
        """Its number, in the order of creation."""


Row = TypeVar("Row", bound=Numbered)


def read_page(
    read: Callable[..., list[Row]], cursor: str | None, limit: int
) -> tuple[list[Row], str | None]:
    """Read the rows of a page, and the cursor of the next one; None on the last page.

    Args:
        read: returns at most `limit` rows, newest first, older than number `before`.
        cursor: of the page; None: the first page.
        limit: most rows of the page.

    Raises:
        DocumentError: the text is not a cursor.
    """
    rows = read(before=_number_of(cursor), limit=limit + 1)
    shown = rows[:limit]
    has_more = len(rows) > limit
    return shown, _cursor_of(shown[-1].number) if has_more else None


def _cursor_of(number: int) -> str:
    return base64.urlsafe_b64encode(f"before {number}".encode()).decode()


def _number_of(cursor: str | None) -> int | None:
    """The number in a cursor, within 64 bits; None for the first page."""
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
