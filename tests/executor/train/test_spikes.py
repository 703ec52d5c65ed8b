"""Loss spikes, by their documented rule."""

from __future__ import annotations

import math
import random

import pytest

from planner.executor.train.spikes import LEAST, SpikeWatch


def spikes(losses: list[float]) -> list[int]:
    """Steps that are told."""
    watch = SpikeWatch()
    return [
        step for step, loss in enumerate(losses) if watch.look(step, loss) is not None
    ]


def noisy(steps: int, seed: int = 0) -> list[float]:
    """A training: falling, with noise."""
    rng = random.Random(seed)
    return [2 + 4 * math.exp(-step / 40) + rng.gauss(0, 0.05) for step in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_trainings_do_not_spike(seed: int) -> None:
    """Neither the noise nor the fall of a loss is one."""
    assert spikes(noisy(200, seed)) == []


def test_a_spike_is_told_with_its_figures() -> None:
    """And those that follow it are not hidden by it: the median does not move."""
    losses = noisy(60)
    losses[40] = losses[41] = 9.0
    assert spikes(losses) == [40, 41]
    watch = SpikeWatch()
    told = [watch.look(step, loss) for step, loss in enumerate(losses)][40]
    assert told is not None
    assert told.startswith("the loss of step 40 spikes: 9.0000, ")
    assert "of the 32 steps before" in told


def test_what_is_no_spike() -> None:
    """A loss that hardly moves, one that falls at once, an infinite one of fp16, and the first ones."""
    assert spikes([1.0] * 50 + [1.05] * 5) == []
    assert spikes([5.0] * 50 + [0.1] * 50) == []
    assert spikes([*noisy(30), math.inf, *noisy(5)]) == []
    assert spikes([1.0] * (LEAST - 1) + [100.0]) == []
    assert spikes([1.0] * LEAST + [100.0]) == [LEAST]
    assert spikes([0.0] * LEAST + [1e-300]) == [LEAST]
