"""Intervals of predictions from the residuals of held-out runs.

A residual is log(measured / predicted) of a run that was held out of the fit. Its kind
is what the fit knew without it:

    runtime        the runtime was measured on the architecture
    architecture   the architecture was measured, with other runtimes
    neither        neither was

Every source has the same weight, however many runs it has: the next user is a new
source. Quantiles of few sources are too narrow for a new one, so the level of the
quantiles is raised until the interval from all other sources contains 80 % of a source,
as a mean over the sources (Barber et al. 2021, "Predictive inference with the
jackknife+", for the idea of leaving out what is predicted).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

import numpy as np

from planner.spec.calibration import Kind, Residuals

COVERAGE = 0.8
"""Share of measured values that an interval contains."""
LEVELS = tuple(round(0.8 + 0.01 * step, 2) for step in range(11))
"""Levels of two-sided quantiles that are tried, from the narrowest; beyond 90 % a few
outliers decide."""
MINIMUM_SOURCES = 3
"""Fewest sources of a kind; with fewer the residuals of all kinds are used."""
GRID = tuple(round(0.05 * place, 2) for place in range(1, 20))
"""Probabilities of the quantiles that a calibration stores."""
KINDS: tuple[Kind, ...] = ("runtime", "architecture", "neither")
"""From the narrowest to the widest."""

UNKNOWN = Residuals(
    low=-0.4, high=0.4, quantiles=tuple(probability - 0.5 for probability in GRID)
)
"""Distribution without any residual."""

Residual = tuple[str, float]
"""Source, and log(measured / predicted) of a held-out run."""
BySource = Mapping[str, Sequence[float]]


def distributions(
    residuals: Mapping[Kind, Sequence[Residual]],
) -> dict[Kind, Residuals]:
    """Return the distribution of every kind, each at least as wide as the one before.

    Args:
        residuals: of held-out runs, by what the fit knew of them.
    """
    everyone = [one for each in residuals.values() for one in each]
    found: dict[Kind, Residuals] = {}
    narrower: Residuals | None = None
    for kind in KINDS:
        chosen = list(residuals.get(kind, ()))
        if len({source for source, _ in chosen}) < MINIMUM_SOURCES:
            chosen = everyone
        narrower = found[kind] = _at_least(_distribution(chosen), narrower)
    return found


def coverage(residuals: Sequence[Residual], level: float) -> float:
    """Return the share within the interval from other sources, as a mean over sources.

    Args:
        residuals: of at least two sources.
        level: of the two-sided quantiles.
    """
    by_source = _by_source(residuals)
    shares = []
    for source, values in by_source.items():
        others = {name: each for name, each in by_source.items() if name != source}
        low, high = _two_sided(others, level)
        shares.append(mean(low <= value <= high for value in values))
    return mean(shares)


def _distribution(residuals: Sequence[Residual]) -> Residuals:
    """The interval at the level that covers other sources, and the quantiles."""
    if not residuals:
        return UNKNOWN
    by_source = _by_source(residuals)
    level = _level(residuals)
    low, high = _two_sided(by_source, level)
    quantiles = tuple(_quantile(by_source, probability) for probability in GRID)
    return Residuals(low=low, high=high, quantiles=quantiles)


def _level(residuals: Sequence[Residual]) -> float:
    """The first level whose intervals from other sources cover enough of a source."""
    if len({source for source, _ in residuals}) < 2:
        return LEVELS[0]
    for level in LEVELS:
        if coverage(residuals, level) >= COVERAGE:
            return level
    return LEVELS[-1]


def _at_least(found: Residuals, narrower: Residuals | None) -> Residuals:
    """Residuals that are nowhere narrower than those of a better-known kind."""
    if narrower is None:
        return found
    quantiles = []
    for place, probability in enumerate(GRID):
        pick = min if probability < 0.5 else max
        quantiles.append(pick(found.quantiles[place], narrower.quantiles[place]))
    return Residuals(
        low=min(found.low, narrower.low),
        high=max(found.high, narrower.high),
        quantiles=tuple(quantiles),
    )


def _by_source(residuals: Iterable[Residual]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for source, value in residuals:
        found[source].append(value)
    return dict(found)


def _two_sided(by_source: BySource, level: float) -> tuple[float, float]:
    tail = (1 - level) / 2
    return _quantile(by_source, tail), _quantile(by_source, 1 - tail)


def _quantile(by_source: BySource, probability: float) -> float:
    """Quantile of values of which every source has the same weight."""
    values: list[float] = []
    weights: list[float] = []
    for each in by_source.values():
        values += each
        weights += [1 / len(each)] * len(each)
    order = np.argsort(values, kind="stable")
    ordered = np.asarray(values)[order]
    shares = np.asarray(weights)[order] / len(by_source)
    middles = np.cumsum(shares) - shares / 2
    return round(float(np.interp(probability, middles, ordered)), 4)
