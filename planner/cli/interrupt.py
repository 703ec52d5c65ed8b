"""Ctrl-C while the solver works.

CP-SAT runs in C++ for as long as its time limit, where Python cannot raise KeyboardInterrupt, and may itself take
SIGINT, to end one of the search's many solves only. So the solver works in a thread, SIGINT is held back from it and
from every thread that it starts, and the main thread looks for the signal. Libraries that start threads when they are
imported must be imported by the work itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from planner.cli.failures import INTERRUPTED, report_interrupt

Result = TypeVar("Result")

POLL_SECONDS = 0.02
GRACE_SECONDS = 0.5
"""Between two solves the search ends by itself; it gets this long."""


def interruptible(work: Callable[[Callable[[], bool]], Result]) -> Result:
    """Do solver work that Ctrl-C ends at once.

    Args:
        work: takes a function that tells whether to stop, for work that can ask.

    Raises:
        KeyboardInterrupt: after Ctrl-C, once the work has ended. When it does not end soon the process does.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):
        return work(lambda: False)
    stop = threading.Event()
    worker = _Worker(lambda: work(stop.is_set))
    with _holding_back_sigint():
        worker.start()
        try:
            _watch(worker)
        except KeyboardInterrupt:
            stop.set()
            _end(worker)
            raise
    return worker.result()


def _watch(worker: threading.Thread) -> None:
    """Wait for the work's end, or for SIGINT."""
    while worker.is_alive():
        worker.join(POLL_SECONDS)
        if signal.SIGINT in signal.sigpending():
            signal.sigwait({signal.SIGINT})
            raise KeyboardInterrupt


@contextmanager
def _holding_back_sigint() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(worker: threading.Thread) -> None:
    """Wait a little for the work to stop; end the process when it does not."""
    worker.join(GRACE_SECONDS)
    if not worker.is_alive():
        return
    # An orderly exit would tear the libraries down under the running solver.
    report_interrupt()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


class _Worker(threading.Thread, Generic[Result]):
    """A thread whose result or exception can be asked for."""

    def __init__(self, work: Callable[[], Result]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work."""
        try:
            self._results.append(self._work())
        except BaseException as error:
            self._error = error

    def result(self) -> Result:
        """What the work returned; raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._results[0]
