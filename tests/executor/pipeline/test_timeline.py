"""The recorder's times."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from planner.executor.pipeline import timeline
from planner.executor.pipeline.timeline import Recorder, Span


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """A recorder whose clock reads 10, 11, 12, ... seconds."""
    ticks = itertools.count(10.0)
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: next(ticks))
    return Recorder(torch.device("cpu"))


def test_times_count_from_the_start_of_the_step(recorder: Recorder) -> None:
    """One tick passes before each mark."""
    recorder.begin_step()
    recorder.start("0F0")
    recorder.stop()
    with recorder.span("optimizer"):
        pass
    assert recorder.end_step() == (Span("0F0", 1.0, 2.0), Span("optimizer", 3.0, 4.0))


def test_waits_stand_apart(recorder: Recorder) -> None:
    """They are no part of an action, and those of the step before are gone."""
    for _ in range(2):
        recorder.begin_step()
        with recorder.wait("1F0"):
            pass
        with recorder.span("1F0"):
            pass
        assert recorder.end_step() == (Span("1F0", 3.0, 4.0),)
        assert recorder.waits == (Span("1F0", 1.0, 2.0),)
    with recorder.wait("1F0"):
        pass
    recorder.begin_step()
    recorder.end_step()
    assert recorder.waits == ()


def test_nothing_is_recorded_between_steps(recorder: Recorder) -> None:
    """Actions outside of a step leave no trace in the next one."""
    recorder.start("0F0")
    recorder.stop()
    assert recorder.end_step() == ()
    recorder.begin_step()
    assert recorder.end_step() == ()


def test_an_action_is_recorded_in_some_microseconds() -> None:
    """Which is less than 1 % of an action of a millisecond."""
    recorder = Recorder(torch.device("cpu"))
    recorder.begin_step()
    seconds = []
    for _ in range(20):
        start = time.process_time()
        for _ in range(500):
            with recorder.span("0F0"):
                pass
        seconds.append((time.process_time() - start) / 500)
    assert min(seconds) < 1e-5
    assert len(recorder.end_step()) == 20 * 500
