"""SIGTERM is noted, and its grace is counted even while the process runs no Python."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, HashStore  # type: ignore[attr-defined]

from planner.errors import StoppedError
from planner.executor.failures.failure import (
    read_late,
    read_stopped,
    write_late,
    write_stopped,
)
from planner.executor.failures.stopping import StopRequest

GRACE_SECONDS, HANGING_SECONDS = 0.5, 2.5
ENOUGH_SECONDS = 60.0
"""For a hundredth of a second, on any busy machine."""


def hang(seconds: float) -> None:
    """Wait as a rank in a collective does: in C++, where no handler of Python's runs."""
    with pytest.raises(DistStoreError):
        HashStore().wait(["never"], timedelta(seconds=seconds))


def test_a_step_that_outlasts_the_grace_is_left() -> None:
    """Before the grace is over, from another thread, however the main one hangs."""
    begun, late = time.monotonic(), list[float]()
    with StopRequest(
        GRACE_SECONDS, lambda: late.append(time.monotonic() - begun)
    ) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        hang(HANGING_SECONDS)
        assert asked()
    (seconds,) = late
    assert 0.8 * GRACE_SECONDS <= seconds < 0.9 * HANGING_SECONDS


def test_a_step_that_ends_in_time_is_not_left() -> None:
    """Nor one that was not told to stop; the handler and the thread are gone afterwards."""
    before, threads = signal.getsignal(signal.SIGTERM), threading.active_count()
    late: list[bool] = []
    for told in (True, False):
        with StopRequest(ENOUGH_SECONDS, lambda: late.append(True)) as asked:
            if told:
                os.kill(os.getpid(), signal.SIGTERM)
            hang(0.01)
            assert asked() == told
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert (threading.active_count(), signal.getsignal(signal.SIGTERM)) == (
        threads,
        before,
    )
    assert late == [], "and no thread is left that could add to it"
    assert signal.set_wakeup_fd(-1) == -1


def test_the_launcher_tells_what_is_kept(tmp_path: Path) -> None:
    """A checkpoint of the stop itself, the one before, or none."""
    notes, checkpoints = tmp_path / "notes", tmp_path / "checkpoints"
    notes.mkdir()
    assert "since the last checkpoint are lost" in str(read_stopped(notes))
    assert read_late(notes, seconds=10) is None
    write_late(notes, checkpoints, 7.5)
    assert "within the grace period of 7.5 seconds and are lost; there is no" in str(
        read_stopped(notes)
    )
    (checkpoints / "step-00000004").mkdir(parents=True)
    (checkpoints / "step-00000004" / "manifest.json").touch()
    write_late(notes, checkpoints, 7.5)
    late = read_late(notes, seconds=10)
    assert isinstance(late, StoppedError)
    assert f"checkpoint is {checkpoints / 'step-00000004'}." in str(late)
    assert "--grace" in late.problems[0].hint
    assert read_late(notes, seconds=-1) is None, "word of another time"
    write_stopped(notes, 5, checkpoints / "step-00000005")
    assert "after 5 steps" in str(read_stopped(notes))


@pytest.mark.filterwarnings(
    "ignore:.*use of fork:DeprecationWarning"
)  # this process has threads
def test_children_of_the_user_are_ended_by_sigterm() -> None:
    """They neither note it instead, nor wake the thread of the rank, which would leave as if it had been told to."""
    late: list[bool] = []
    with StopRequest(GRACE_SECONDS, lambda: late.append(True)) as asked:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        time.sleep(GRACE_SECONDS)
        assert not asked()
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert late == []
