"""Slow ranks are told from noise."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from planner.executor.elastic.drift import (
    LOOK_STEPS,
    WARM_UP_STEPS,
    DriftWatch,
    Estimate,
    look_at,
)

PREDICTED = (1.0, 2.0, 1.0, 4.0)
STEPS = 200

Busy = Callable[[int, int], float]
"""(step, pipeline rank) -> measured over predicted seconds."""


def drifts(
    busy: Busy, ranks: int = 4, steps: int = STEPS
) -> list[tuple[int, tuple[float, ...]]]:
    """(steps trained, drifts), whenever drift was told, by looks as soon as they are due."""
    watch, told = DriftWatch(), []
    for step in range(steps):
        watch.record([busy(step, rank) * PREDICTED[rank] for rank in range(ranks)])
        if watch.is_due and (found := watch.look(PREDICTED[:ranks])) is not None:
            told.append((step + 1, found))
    return told


def noisy(generator: random.Random) -> float:
    """On shared cores: a third of all steps takes up to three times as long."""
    return (
        generator.uniform(1.0, 3.0)
        if generator.random() < 0.35
        else generator.gauss(1.0, 0.05)
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_noise_is_no_drift(ranks: int) -> None:
    """In none of a hundred runs of two hundred steps, whose medians of eight steps often differ by more than 1.2."""
    looks = 0
    for seed in range(100):
        generator = random.Random(seed)
        ratios = [[noisy(generator) for _ in range(ranks)] for _ in range(STEPS)]
        assert drifts(lambda step, rank, ratios=ratios: ratios[step][rank], ranks) == []
        starts = range(WARM_UP_STEPS, STEPS - LOOK_STEPS, LOOK_STEPS)
        looks += sum(
            max(look_at(ratios[i : i + LOOK_STEPS], (1.0,) * ranks).drifts) > 1.2
            for i in starts
        )
    assert looks > 100, "one look by its medians alone would have moved layers"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_rank_is_found_under_noise(ranks: int, slow: int) -> None:
    """At twice the others' seconds, in every one of fifty runs, with about the right drift, and told once."""
    for seed in range(50):
        generator = random.Random(seed)
        factors = [2.0 if rank == slow else 1.0 for rank in range(ranks)]
        ratios = [
            [generator.gauss(1.0, 0.05) * factor for factor in factors]
            for _ in range(STEPS)
        ]
        ((when, found),) = drifts(
            lambda step, rank, ratios=ratios: ratios[step][rank], ranks
        )
        assert when == WARM_UP_STEPS + 2 * LOOK_STEPS
        assert found[slow] == pytest.approx(2.0, rel=0.1)


def test_a_rank_that_becomes_slow_later_is_found_then() -> None:
    """After two looks; and again when it becomes slower still."""
    told = drifts(
        lambda step, rank: (
            {0: 1.0, 1: 1.5, 2: 3.0}[step // 60] if rank == 1 and step < 180 else 1.0
        )
    )
    times, found = zip(*told, strict=True)
    assert [round(each[1], 1) for each in found] == [1.5, 3.0]
    assert all(
        LOOK_STEPS < when - 60 * at <= 3 * LOOK_STEPS
        for at, when in enumerate(times, 1)
    )


def test_a_while_of_a_look_is_no_drift() -> None:
    """Somebody else's work on the rank's core that ends; nor are all ranks alike, or a tenth apart."""
    assert (
        drifts(
            lambda step, rank: (
                3.0 if rank == 2 and 10 <= step < 10 + LOOK_STEPS else 1.0
            )
        )
        == []
    )
    assert drifts(lambda step, rank: 3.0) == []
    assert drifts(lambda step, rank: 1.1 if rank == 2 else 1.0) == []


def test_the_noise_of_a_median() -> None:
    """About that of medians of many samples; none where all are equal."""
    generator = random.Random(1)
    samples = [[generator.gauss(1.0, 0.1) for _ in range(32)] for _ in range(400)]
    medians = [Estimate.of(each).value for each in samples]
    mean = sum(medians) / len(medians)
    true = (sum((each - mean) ** 2 for each in medians) / len(medians)) ** 0.5
    told = sorted(Estimate.of(each).noise for each in samples)[len(samples) // 2]
    assert told == pytest.approx(true, rel=0.25)
    assert Estimate.of([2.0] * 8) == Estimate(2.0, 0.0)
