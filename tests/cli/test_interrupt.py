"""Ctrl-C while the solver works."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from planner.cli.interrupt import interruptible
from planner.errors import LayoutError

HARNESS = """
import signal, sys, time
from planner.cli.interrupt import interruptible

def stubborn(should_stop):
    print("working", flush=True)
    time.sleep(600)

def obedient(should_stop):
    print("working", flush=True)
    while not should_stop():
        time.sleep(0.01)

# A shell without job control starts background commands with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    interruptible({work})
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("work", "code", "told"),
    [("stubborn", 130, "planner: interrupted\n"), ("obedient", 7, "")],
)
def test_sigint_ends_the_work(work: str, code: int, told: str) -> None:
    """Work that asks is left to end, and KeyboardInterrupt goes on; work that never asks is ended with the process."""
    command = [sys.executable, "-c", HARNESS.format(work=work)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, said) == (code, told)


def test_results_and_errors_pass_through() -> None:
    """Work that nobody interrupts returns and raises as if it were called, and SIGINT is let through again."""

    def fail(should_stop: object) -> None:
        raise LayoutError("does not fit.")

    assert interruptible(lambda should_stop: should_stop()) is False
    with pytest.raises(LayoutError, match="does not fit"):
        interruptible(fail)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


def test_outside_of_the_main_thread() -> None:
    """A thread cannot look for signals, so it just works."""
    found: list[threading.Thread] = []
    thread = threading.Thread(
        target=lambda: found.append(interruptible(lambda _: threading.current_thread()))
    )
    thread.start()
    thread.join()
    assert found == [thread]
