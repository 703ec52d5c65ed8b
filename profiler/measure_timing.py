"""Timing of phases on a device: CUDA events on a GPU, the performance counter on a CPU.

A run marks the borders of its phases; it is repeated until warm, then sampled until the medians stand still or its
share of time is used up. Medians, because a shared machine disturbs single samples and never makes one faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import torch

Mark = Callable[[], None]
"""Called at the border of two phases."""
Run = Callable[[Mark], None]
"""Calls its mark at the start of the first phase and at the end of every phase; what comes before is not timed."""

MOST_WARM_UP_RUNS = 4
WARM_CHANGE = 0.1
"""A run that is not faster than the one before by more than this share is warm."""
FEWEST_SAMPLES = 2
"""When the time is used up."""
STEADY_SAMPLES = 3
"""Before samples may be called steady."""
MOST_SAMPLES = 30
STEADY = 0.02
"""Enough samples: the standard error of the median's estimate is below this share of the median."""
ERROR_OF_MEDIAN = 1.2533 / 1.349
"""Standard error of a median / (interquartile range / sqrt(samples)) of normal noise: sqrt(pi/2) / (2 x 0.6745)."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of a run; each holds the seconds of every phase."""

    samples: tuple[tuple[float, ...], ...]

    def median(self, of: Callable[[tuple[float, ...]], float] = sum) -> float:
        """Median over the samples of a figure of one sample.

        A difference or ratio of two phases is taken within each sample: what disturbs one of them for longer than a
        run disturbs the other too.
        """
        return statistics.median(of(sample) for sample in self.samples)

    @property
    def spread(self) -> float:
        """Interquartile range over median, of the whole run."""
        return _spread([sum(sample) for sample in self.samples])


def time_phases(run: Run, device: torch.device, *, limit_seconds: float) -> Timing:
    """Sample the seconds of the phases of a run.

    Args:
        run: marks its phases; must do the same work each time.
        device: where the work is done.
        limit_seconds: no further run is started after this time, except that one warm-up run and `FEWEST_SAMPLES` are
            always made.
    """
    deadline = perf_counter() + limit_seconds
    _warm_up(run, device, deadline)
    samples: list[tuple[float, ...]] = []
    while len(samples) < FEWEST_SAMPLES or not (
        _is_enough(samples) or perf_counter() > deadline
    ):
        samples.append(_sample(run, device))
    return Timing(tuple(samples))


def _warm_up(run: Run, device: torch.device, deadline: float) -> None:
    """Allocate what stays allocated (gradients, workspaces), and let caches and clocks settle."""
    before = math.inf
    for _ in range(MOST_WARM_UP_RUNS):
        now = sum(_sample(run, device))
        if now > (1 - WARM_CHANGE) * before or perf_counter() > deadline:
            return
        before = now


def _sample(run: Run, device: torch.device) -> tuple[float, ...]:
    return _sample_cuda(run, device) if device.type == "cuda" else _sample_cpu(run)


def _sample_cpu(run: Run) -> tuple[float, ...]:
    times: list[float] = []
    run(lambda: times.append(perf_counter()))
    return _differences(times)


def _sample_cuda(run: Run, device: torch.device) -> tuple[float, ...]:
    events: list[torch.cuda.Event] = []

    def mark() -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append(event)

    torch.cuda.synchronize(device)
    run(mark)
    torch.cuda.synchronize(device)
    return _differences([events[0].elapsed_time(event) * 1e-3 for event in events])


def _differences(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(after - before for before, after in pairwise(times))


def _is_enough(samples: Sequence[tuple[float, ...]]) -> bool:
    if not STEADY_SAMPLES <= len(samples) < MOST_SAMPLES:
        return len(samples) >= MOST_SAMPLES
    spread = _spread([sum(sample) for sample in samples])
    return ERROR_OF_MEDIAN * spread / math.sqrt(len(samples)) < STEADY


def _spread(totals: Sequence[float]) -> float:
    if len(totals) < 2 or statistics.median(totals) == 0:
        return 0.0
    lower, _, upper = statistics.quantiles(totals, n=4, method="inclusive")
    return (upper - lower) / statistics.median(totals)
