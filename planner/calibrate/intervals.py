"""Intervals of predictions from the residuals of held-out runs.

A residual is log(measured / predicted) of a run whose whole source was held out of the
fit. It belongs to the kind that the fit knew without that source:

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

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from planner.spec.calibration import (
    MINIMUM_ROWS,
    IntervalRow,
    Kind,
    Residuals,
    RowCounts,
    pair_name,
)

COVERAGE = 0.8
"""Share of measured values that an interval contains."""
LEVELS = tuple(round(0.8 + 0.01 * step, 2) for step in range(20))
"""Levels of two-sided quantiles that are tried, from the narrowest."""
MINIMUM_SOURCES = 3
"""Fewest sources of a kind; with fewer the residuals of all kinds are used."""
GRID = tuple(round(0.05 * place, 2) for place in range(1, 20))
"""Probabilities of the quantiles that a calibration stores."""
KINDS: tuple[Kind, ...] = ("runtime", "architecture", "neither")
"""From the narrowest to the widest."""


@dataclass(frozen=True, slots=True)
class Residual:
    """log(measured / predicted) of a run whose source was held out of the fit."""

    value: float
    source: str
    runtime: str
    """Owner of the runtime's constants."""
    architecture: str


def intervals(
    time: Sequence[Residual], memory: Sequence[Residual]
) -> dict[Kind, IntervalRow]:
    """Return the residuals of every kind, each at least as wide as the one before.

    Args:
        time: of step times.
        memory: of peak memory.
    """
    times = _by_kind(time)
    sizes = _by_kind(memory)
    return {kind: IntervalRow(time=times[kind], memory=sizes[kind]) for kind in KINDS}


def row_counts(residuals: Iterable[Residual]) -> RowCounts:
    """Return the number of runs by runtime, by architecture and by both."""
    runtimes: Counter[str] = Counter()
    architectures: Counter[str] = Counter()
    pairs: Counter[str] = Counter()
    for one in residuals:
        runtimes[one.runtime] += 1
        architectures[one.architecture] += 1
        pairs[pair_name(one.runtime, one.architecture)] += 1
    return RowCounts(
        runtime=dict(sorted(runtimes.items())),
        architecture=dict(sorted(architectures.items())),
        runtime_architecture=dict(sorted(pairs.items())),
    )


def kinds_of(residuals: Sequence[Residual]) -> list[Kind]:
    """Return the kind of every residual: what runs of other sources make known."""
    pairs: Counter[tuple[str, str]] = Counter()
    architectures: Counter[str] = Counter()
    own_pairs: Counter[tuple[str, str, str]] = Counter()
    own_architectures: Counter[tuple[str, str]] = Counter()
    for one in residuals:
        pairs[one.runtime, one.architecture] += 1
        architectures[one.architecture] += 1
        own_pairs[one.source, one.runtime, one.architecture] += 1
        own_architectures[one.source, one.architecture] += 1
    kinds: list[Kind] = []
    for one in residuals:
        pair = pairs[one.runtime, one.architecture]
        pair -= own_pairs[one.source, one.runtime, one.architecture]
        architecture = architectures[one.architecture]
        architecture -= own_architectures[one.source, one.architecture]
        if pair >= MINIMUM_ROWS:
            kinds.append("runtime")
        elif architecture >= MINIMUM_ROWS:
            kinds.append("architecture")
        else:
            kinds.append("neither")
    return kinds


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


def _by_kind(residuals: Sequence[Residual]) -> dict[Kind, Residuals]:
    """Residuals of every kind; a kind of few sources has those of all."""
    groups: dict[Kind, list[Residual]] = defaultdict(list)
    for one, kind in zip(residuals, kinds_of(residuals), strict=True):
        groups[kind].append(one)
    found: dict[Kind, Residuals] = {}
    narrower: Residuals | None = None
    for kind in KINDS:
        chosen = groups[kind]
        if len({one.source for one in chosen}) < MINIMUM_SOURCES:
            chosen = list(residuals)
        narrower = found[kind] = _at_least(_distribution(chosen), narrower)
    return found


def _distribution(residuals: Sequence[Residual]) -> Residuals:
    """The interval at the level that covers other sources, and the quantiles."""
    by_source = _by_source(residuals)
    level = _level(residuals)
    low, high = _two_sided(by_source, level)
    stretch = level / COVERAGE
    quantiles = []
    for probability in GRID:
        moved = 0.5 + (probability - 0.5) * stretch
        quantiles.append(_quantile(by_source, min(max(moved, 0.0), 1.0)))
    return Residuals(low=low, high=high, quantiles=tuple(quantiles))


def _level(residuals: Sequence[Residual]) -> float:
    """The first level whose intervals from other sources cover enough of a source."""
    if len({one.source for one in residuals}) < 2:
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
    for one in residuals:
        found[one.source].append(one.value)
    return dict(found)


def _two_sided(
    by_source: Mapping[str, Sequence[float]], level: float
) -> tuple[float, float]:
    tail = (1 - level) / 2
    return _quantile(by_source, tail), _quantile(by_source, 1 - tail)


def _quantile(by_source: Mapping[str, Sequence[float]], probability: float) -> float:
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
