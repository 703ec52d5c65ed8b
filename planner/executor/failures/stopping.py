"""SIGTERM: what a scheduler, or torchrun, sends before it takes the machine away.

The signal only leaves a mark: a run stops between two steps, when its ranks agree on it. Whoever sends it kills what is
still there after a grace, so a rank whose step and checkpoint are not done shortly before leaves without them, and says
so: what was kept before stays.

A rank that waits for another inside of a collective runs no Python until that is over, not even a signal's handler. So
the grace is counted by a thread, which the interpreter's own C handler wakes (`signal.set_wakeup_fd`).

All that is this process' own: one that the user's code forks (a worker of his data) is ended by SIGTERM like any other,
and does not wake its parent's thread.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from planner.executor.failures.failure import STOPPED, write_late

SPARED_SECONDS = 5.0
"""Of the grace, at most: what a process needs to leave; of a short grace a fifth."""


class StopRequest:
    """Within, SIGTERM is noted instead of ending the process; only the main thread can do so.

    Args:
        grace_seconds: from the signal until whoever sent it kills.
        too_late: called by another thread when the block has not been left shortly before the grace ends; None: never.
    """

    def __init__(
        self, grace_seconds: float = 0.0, too_late: Callable[[], None] | None = None
    ) -> None:
        self._asked = False
        self._before: Any = None
        self._too_late = too_late
        self._patience_seconds = grace_seconds - min(SPARED_SECONDS, grace_seconds / 5)
        self._wakes: tuple[socket.socket, socket.socket] | None = None
        self._woken_before = -1
        self._is_within = False

    def __call__(self) -> bool:
        """Was this process told to stop?"""
        return self._asked

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._is_within = True
            self._keep_from_children()
            if self._too_late is not None:
                self._count_grace()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._let_go()
        if self._wakes is not None:
            self._wakes[1].close()  # which ends the thread

    def _keep_from_children(self) -> None:
        """A child that is ended at once must not meet the handler first: SIGTERM waits while processes are forked."""
        os.register_at_fork(  # for good, so all three look whether the block was left
            before=lambda: self._block(signal.SIG_BLOCK),
            after_in_parent=lambda: self._block(signal.SIG_UNBLOCK),
            after_in_child=self._become_child,
        )

    def _block(self, how: int) -> None:
        if self._is_within:
            signal.pthread_sigmask(how, {signal.SIGTERM})

    def _become_child(self) -> None:
        if self._is_within:
            self._let_go()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        """Have signals do what they did before."""
        if not self._is_within:
            return
        self._is_within = False
        if self._wakes is not None:
            signal.set_wakeup_fd(self._woken_before)
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True

    def _count_grace(self) -> None:
        self._wakes = socket.socketpair()
        self._wakes[1].setblocking(False)
        self._woken_before = signal.set_wakeup_fd(
            self._wakes[1].fileno(), warn_on_full_buffer=False
        )
        threading.Thread(
            target=self._watch,
            args=(self._wakes[0],),
            name="planner-grace",
            daemon=True,
        ).start()

    def _watch(self, wakes: socket.socket) -> None:
        """Until the block is left, or the grace is nearly over."""
        until: float | None = None
        with wakes:
            while select.select(
                [wakes],
                [],
                [],
                None if until is None else max(until - time.monotonic(), 0.0),
            )[0]:
                signals = wakes.recv(64)
                if not signals:
                    return
                if until is None and signal.SIGTERM in signals:
                    until = time.monotonic() + self._patience_seconds
        if self._too_late is not None:
            self._too_late()


def leaving_in_time(
    grace_seconds: float, directory: Path, failures: Path | None
) -> StopRequest:
    """A request that ends this process when its step, with the checkpoint after it, lasts longer than the grace.

    Args:
        directory: of the checkpoints.
        failures: folder for word of it; None: the launcher is not here, only stderr is told.
    """

    def leave() -> None:
        text = write_late(failures, directory, grace_seconds)
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        os._exit(STOPPED)  # the main thread hangs in its step

    return StopRequest(grace_seconds, leave)
