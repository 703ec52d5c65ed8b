"""Garbage collection during a search."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS = 50_000
"""Allocations between two collections; Python's default is 700."""


@contextmanager
def rare_collection() -> Iterator[None]:
    """Look for garbage rarely.

    A search makes millions of small objects, keeps most of them until it ends, and has
    few cycles among them: collection would take a fifth of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
