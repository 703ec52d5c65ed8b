"""Partially pooled constants: one global value, and a factor for every owner.

A constant of a run is the product of a global value and the factor of one owner: the
architecture of the device, the runtime, the number format, or the source that measured
(Gelman and Hill 2006, chapter 12, "partial pooling"). Runs of one owner move its factor
only as far as they outweigh its prior, so that what few runs say stays near what all
others say; an owner without runs has the factor one.

    log c(run) = log global(c) + offset(c, owner(run))

    minimise    sum over runs of w^2 rho(log(predicted / measured) / sigma)
              + sum over globals of ((log value - log prior) / width)^2
              + sum over offsets of (offset / width)^2

rho is soft L1: a run that a slow node spoilt pulls little. A source weighs at most as
much as `MOST_ROWS` runs. Predictions are linear in the logarithms of the constants
around the last point.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.spec.calibration import OwnerKind

Floats = NDArray[np.float64]

SIGMA = 0.06
"""Relative error of a step time that counts as one unit: what repeated runs differ
by."""
MOST_ROWS = 40
"""Runs of one source weigh at most as much as so many."""
LEAST_ROWS = 6
"""Runs below which an owner has no factor of its own."""
REWEIGHTINGS = 12
"""Of iteratively reweighted least squares."""


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a constant before any run."""

    value: float
    width: float
    """Spread of the logarithm of the global value."""
    owner: OwnerKind
    owner_width: float
    """Spread of the logarithm of an owner's factor."""
    least: float = 0.0
    most: float = math.inf

    def bounded(self, value: float) -> float:
        """Return the nearest value that physics permits."""
        return min(max(value, self.least), self.most)


Priors = Mapping[str, Prior]
Owners = Mapping[OwnerKind, str]
"""Name of a run's owner of every kind."""


@dataclass(frozen=True)
class Pooled:
    """Global constants, and the logarithms of the factors of owners."""

    constants: Mapping[str, float]
    offsets: Mapping[str, Mapping[str, float]]
    """By constant and owner."""

    def values(self, priors: Priors, owners: Owners) -> dict[str, float]:
        """Return the constants of a run with these owners."""
        found = {}
        for name, prior in priors.items():
            offset = self.offsets.get(name, {}).get(owners[prior.owner], 0.0)
            found[name] = prior.bounded(self.constants[name] * math.exp(offset))
        return found

    def logarithm(self, name: str, owner: str) -> float:
        """Return the logarithm of a global value (no owner), or of a factor."""
        if owner:
            return self.offsets.get(name, {}).get(owner, 0.0)
        return math.log(self.constants[name])


def unfitted(priors: Priors) -> Pooled:
    """Return the priors, without any run."""
    return Pooled({name: prior.value for name, prior in priors.items()}, {})


@dataclass(frozen=True)
class Linear:
    """Predictions of runs, linear in the logarithms of the constants at a point."""

    priors: Priors
    owners: Sequence[Owners]
    """Of every run."""
    at: Pooled
    errors: Floats
    """log(predicted / measured) of every run; 0 where a decision is right."""
    slopes: Floats
    """Shape (runs, constants): of the error by the logarithm of a constant."""
    weights: Floats
    """Of every run, for what it measures."""
    centre: Pooled | None = None
    """Constants that runs refine; None: those of the priors."""
    sigma: float = SIGMA
    """Relative error that counts as one unit."""

    def errors_at(self, point: Pooled) -> Floats:
        """Return the errors of all runs at another point."""
        names = list(self.priors)
        moved = np.zeros_like(self.slopes)
        for row, owners in enumerate(self.owners):
            there = point.values(self.priors, owners)
            here = self.at.values(self.priors, owners)
            for column, name in enumerate(names):
                moved[row, column] = math.log(there[name] / here[name])
        return np.asarray(self.errors + (self.slopes * moved).sum(axis=1))


def solve(linear: Linear, chosen: Sequence[int]) -> Pooled:
    """Return the constants under which the chosen runs are predicted best."""
    names = list(linear.priors)
    owners = [linear.owners[place] for place in chosen]
    columns = [(name, "") for name in names]
    for name in names:
        known = _known_owners(owners, linear.priors[name].owner)
        columns += [(name, owner) for owner in known]
    matrix = np.zeros((len(owners), len(columns)))
    for place, (name, owner) in enumerate(columns):
        of_constant = linear.slopes[list(chosen), names.index(name)]
        if owner:
            kind = linear.priors[name].owner
            mine = np.array([one[kind] == owner for one in owners])
            of_constant = of_constant * mine
        matrix[:, place] = of_constant
    weights = _source_weights(owners) * linear.weights[list(chosen)]
    point = _reweighted(
        matrix,
        linear.errors[list(chosen)],
        weights / linear.sigma,
        _start(linear, columns),
        linear.sigma,
    )
    return _pooled(linear.priors, columns, point)


@dataclass(frozen=True, slots=True)
class _Start:
    point: Floats
    centre: Floats
    width: Floats


def _start(linear: Linear, columns: Sequence[tuple[str, str]]) -> _Start:
    priors = linear.priors
    known = linear.centre or unfitted(priors)
    centre = [known.logarithm(*column) for column in columns]
    width = [
        priors[name].owner_width if owner else priors[name].width
        for name, owner in columns
    ]
    point = [linear.at.logarithm(*column) for column in columns]
    return _Start(np.array(point), np.array(centre), np.array(width))


def _reweighted(
    matrix: Floats, errors: Floats, weights: Floats, start: _Start, sigma: float
) -> Floats:
    """Minimise soft L1 of the errors and the squares of the priors."""
    point = start.point
    for _ in range(REWEIGHTINGS):
        left = errors + matrix @ (point - start.point)
        soft = weights / (1 + (left / sigma) ** 2) ** 0.25
        target = soft * (matrix @ start.point - errors)
        system = np.vstack([matrix * soft[:, None], np.diag(1 / start.width)])
        wanted = np.concatenate([target, start.centre / start.width])
        point = np.linalg.lstsq(system, wanted, rcond=None)[0]
    return np.asarray(point)


def _source_weights(owners: Sequence[Owners]) -> Floats:
    counts = Counter(one["source"] for one in owners)
    shares = [min(1.0, MOST_ROWS / counts[one["source"]]) for one in owners]
    return np.asarray(np.sqrt(np.array(shares)))


def _known_owners(owners: Sequence[Owners], kind: OwnerKind) -> list[str]:
    counts = Counter(one[kind] for one in owners)
    return [owner for owner, rows in counts.items() if owner and rows >= LEAST_ROWS]


def _pooled(
    priors: Priors, columns: Sequence[tuple[str, str]], point: Floats
) -> Pooled:
    constants: dict[str, float] = {}
    offsets: dict[str, dict[str, float]] = {}
    for (name, owner), value in zip(columns, point, strict=True):
        if owner:
            offsets.setdefault(name, {})[owner] = round(float(value), 4)
        else:
            constants[name] = priors[name].bounded(math.exp(float(value)))
    return Pooled(constants, offsets)
