"""Fit what a linear layer's products reach in fp8, after and apart from all other constants.

    minimise over c = fp8_fraction    sum over fp8 runs of rho((log(predicted / measured) / sigma)^2)
                                      + ((log c - log prior) / width)^2

with every other constant as runs in other precisions have fitted it: those are the same whether fp8 runs are there or
not. Per framework and architecture with enough runs; the median of these stands for all other frameworks of an
architecture, and the prior for architectures without any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from planner.fidelity.calibrations import ANY
from planner.fidelity.fit import FP8_PRIOR, fit
from planner.fidelity.outcomes import Pair, pair_of
from planner.fidelity.rows import Run
from planner.spec.calibration import Constants

Seconds = Callable[[Sequence[Run]], Callable[[Constants], list[float]]]
"""Of these runs, under any constants."""


def fp8_fits(
    runs: Sequence[Run],
    base_of: Callable[[Pair], Constants],
    seconds_of: Seconds,
    *,
    least_rows: int,
) -> dict[Pair, tuple[float, int]]:
    """By framework and architecture: `Constants.fp8_fraction`, and the runs behind it.

    Args:
        runs: in fp8, with step times.
        base_of: the other constants of a pair.
        seconds_of: predicts steps.
        least_rows: of a pair that is fitted.
    """
    by_pair: dict[Pair, list[Run]] = {}
    for run in runs:
        by_pair.setdefault(pair_of(run), []).append(run)
    found = {
        pair: (_fit(mine, base_of(pair), seconds_of), len(mine))
        for pair, mine in by_pair.items()
        if len(mine) >= least_rows
    }
    return found | _shared(found)


def _fit(runs: Sequence[Run], base: Constants, seconds_of: Seconds) -> float:
    predict = seconds_of(runs)
    fitted = fit(
        lambda tried: predict(replace(base, fp8_fraction=tried.fp8_fraction)),
        [run.step_seconds or math.nan for run in runs],
        priors={"fp8_fraction": FP8_PRIOR},
    )
    return fitted.fp8_fraction


def _shared(found: Mapping[Pair, tuple[float, int]]) -> dict[Pair, tuple[float, int]]:
    """What stands for the other frameworks of an architecture."""
    shared: dict[Pair, tuple[float, int]] = {}
    for architecture in {pair[1] for pair in found}:
        own = [each for pair, each in found.items() if pair[1] == architecture]
        shared[ANY, architecture] = (
            median(fraction for fraction, _ in own),
            sum(rows for _, rows in own),
        )
    return shared
