"""Results that are kept, as many as are small together: a schedule or graph takes kilobytes, or tens of megabytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

KEPT_UNITS = 500_000
"""(stage, unit) pairs of all schedules that are kept, and of all graphs: about 100 MB each at most."""


class Kept(Generic[Key, Value]):
    """A function that keeps its latest results.

    Args:
        make: the function.
        size_of: of a key's result.
        most: size of all results that are kept; the latest is kept whatever its size.
    """

    def __init__(
        self,
        make: Callable[[Key], Value],
        *,
        size_of: Callable[[Key], int],
        most: int = KEPT_UNITS,
    ) -> None:
        self._make, self._size_of, self._most = make, size_of, most
        self._known: OrderedDict[Key, Value] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def __call__(self, key: Key) -> Value:
        """The result; whatever the function raises is not kept."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        made = self._make(key)
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._size += self._size_of(key)
            while self._size > self._most and len(self._known) > 1:
                oldest, _ = self._known.popitem(last=False)
                self._size -= self._size_of(oldest)
        return made
