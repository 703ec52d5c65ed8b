"""SIGTERM: what a scheduler, or torchrun, sends before it takes the machine away.

The signal only leaves a mark: a run stops between two steps, when its ranks agree on it. torchrun passes the signal on
to every rank, and kills ranks that are still there 30 seconds later.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

STOPPED = 143
"""Exit code of a process that was stopped so: 128 + SIGTERM, as shells report it."""


class StopRequest:
    """Within, SIGTERM is noted instead of ending the process; only the main thread can do so."""

    def __init__(self) -> None:
        self._asked = False
        self._before: Any = None

    def __call__(self) -> bool:
        """Was this process told to stop?"""
        return self._asked

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
