"""Timing of phases, on a clock that the tests move."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import pytest
import torch

from planner.profiler import measure_timing
from planner.profiler.measure_timing import (
    FEWEST_SAMPLES,
    MOST_SAMPLES,
    STEADY_SAMPLES,
    Mark,
    Timing,
    time_phases,
)

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still but for what the run under test takes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs = 0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure_timing, "perf_counter", clock)
    return clock


def run_of(clock: Clock, durations: Iterator[tuple[float, ...]]):  # type: ignore[no-untyped-def]
    """A run that takes the next durations, after a preparation that is not timed."""

    def run(mark: Mark) -> None:
        clock.runs += 1
        clock.now += 100.0
        mark()
        for seconds in next(durations):
            clock.now += seconds
            mark()

    return run


def forever(*durations: tuple[float, ...]) -> Iterator[tuple[float, ...]]:
    """The durations over and over."""
    while True:
        yield from durations


def test_steady_phases_need_the_fewest_samples(clock: Clock) -> None:
    """Phases that always last the same are told exactly, after the fewest samples."""
    timing = time_phases(run_of(clock, forever((1.0, 2.0))), CPU, limit_seconds=1e9)
    assert timing.median() == pytest.approx(3.0)
    assert timing.median(itemgetter(1)) == pytest.approx(2.0)
    assert len(timing.samples) == STEADY_SAMPLES
    assert timing.spread == pytest.approx(0.0)


def test_noise_is_sampled_longer_and_outliers_do_not_count(clock: Clock) -> None:
    """A run that is disturbed now and then is sampled more often, and its median is the undisturbed time."""
    timing = time_phases(
        run_of(clock, forever((1.0,), (1.0,), (1.0,), (9.0,), (1.2,))),
        CPU,
        limit_seconds=1e9,
    )
    assert timing.median() == pytest.approx(1.0)
    assert STEADY_SAMPLES < len(timing.samples) <= MOST_SAMPLES
    assert timing.spread > 0


def test_cold_runs_do_not_count(clock: Clock) -> None:
    """Runs that still get faster are warm-up."""

    def cooling() -> Iterator[tuple[float, ...]]:
        yield from ((8.0,), (4.0,), (2.0,))
        yield from forever((2.0,))

    assert time_phases(
        run_of(clock, cooling()), CPU, limit_seconds=1e9
    ).median() == pytest.approx(2.0)


def test_the_limit_leaves_one_warm_up_run_and_the_fewest_samples(clock: Clock) -> None:
    """However little time there is, the median has its fewest samples, and no more."""
    timing = time_phases(run_of(clock, forever((1.0,), (5.0,))), CPU, limit_seconds=0.0)
    assert len(timing.samples) == FEWEST_SAMPLES
    assert clock.runs == 1 + FEWEST_SAMPLES


def test_empty_phases_take_no_time(clock: Clock) -> None:
    """A run without work has zero seconds and no spread."""
    timing = time_phases(run_of(clock, forever((0.0, 0.0))), CPU, limit_seconds=1.0)
    assert timing.median() == 0.0
    assert timing.spread == 0.0


def test_differences_are_taken_within_samples() -> None:
    """A slow moment that lasts a whole run does not show in the difference of two of its phases."""
    timing = Timing(((1.0, 2.0), (5.0, 6.0), (1.5, 2.5)))
    assert timing.median(lambda sample: sample[1] - sample[0]) == pytest.approx(1.0)
