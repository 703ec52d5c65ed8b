"""What runs that ran out of memory tell of an allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.fidelity.decisions import Decision, decision, fit_decisions
from planner.fidelity.predict import predict_run
from planner.spec.calibration import DEFAULT
from tests.fidelity.support import run


def test_a_factor_is_found_between_what_ran_and_what_did_not() -> None:
    """Runs need 10 + f x GB of 100: if those with f x = 90 / 1.3 and less ran, the factor is 1.3, or little more."""
    sizes = [60 + step for step in range(20)]
    decisions = [
        Decision((10e9,), (size * 1e9,), 100_000_000_000, 10 + 1.3 * size > 100)
        for size in sizes
    ]
    assert 1.3 <= fit_decisions(decisions).allocated_factor <= 1.35


def test_without_decisions_nothing_is_lost() -> None:
    """The prior alone says that what is counted is what is allocated."""
    assert fit_decisions([]).allocated_factor == 1.0


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.7])
def test_filling_is_the_prediction(factor: float) -> None:
    """A run's bytes over the device's memory under any factor are those of its prediction."""
    one = run(layers=8, pp=4, gbs=16)
    told = predict_run(one, replace(DEFAULT, allocated_factor=factor))
    largest = max(row.peak_bytes for row in told.prediction.memory)
    assert decision(one).filling(factor) == pytest.approx(
        largest / told.capacity_bytes, rel=1e-6
    )
