"""Latency and bandwidth of a link, fitted to measured exchanges.

With n ranks, a tensor of S bytes, latency a (seconds of one hop) and bandwidth B (bytes per second of one rank, one
direction), ring algorithms take (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations
in MPICH"; the bus-bandwidth factors of nccl-tests are the same):

    (1) all_reduce                               t = 2 (n - 1) a + 2 (n - 1)/n S/B
    (2) all_gather, reduce_scatter, all_to_all   t =   (n - 1) a +   (n - 1)/n S/B
    (3) broadcast, point_to_point                t =           a +             S/B

S is always the full tensor: what an all_gather returns, what a reduce_scatter takes, what every rank of an all_to_all
holds. With x the hops and y the bytes of a row, and T = x a + y/B its prediction, the fit minimises

    (4) sum_i (T_i - t_i)^2 / (T_i t_i)   =   sum_i (T_i/t_i + t_i/T_i - 2)        over a >= 0, B > 0

the square of the relative residual, taken against the geometric mean of prediction and measurement: sizes span many
orders of magnitude, so every row weighs the same; and to be wrong by a factor of two costs the same in both directions
(residuals relative to t alone prefer predictions that are too short). Each term is convex in (a, 1/B), so the minimum
is the only one. For a fixed ratio r = (1/B)/a the best a has a closed form, which leaves one equation in r:

    (5) a = sqrt(D/A)   with   A = sum_i (x_i + r y_i)/t_i,   D = sum_i t_i/(x_i + r y_i)
    (6) d/dr log(A D) = 0, found by bisection
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import SpecError
from planner.spec import Link, LinkFit, LinkMeasurement, Links

NEGLIGIBLE = 1e-6
"""Below this share of every row, the part that latency (or bandwidth) has in the time is not seen."""
FEWEST_ROWS = 2
"""Latency and bandwidth are two unknowns."""


@dataclass(frozen=True, slots=True)
class Term:
    """One row of the fit: seconds = hops a + bytes/B."""

    hops: float
    bytes: float
    seconds: float

    def over_latency(self, ratio: float) -> float:
        """Predicted seconds for a latency of one second; x + r y."""
        return self.hops + ratio * self.bytes


def fit(
    rows: Sequence[LinkMeasurement], *, overlap_slowdown: float | None = None
) -> Link:
    """The link whose ring formulas come closest to the rows, by equation (4); of every operation by itself, too.

    Rows of groups with several ranks on several nodes run over two links, so they are kept but not fitted.

    Args:
        rows: at least two of groups over this link alone; they should span sizes that are bound by latency and sizes
            that are bound by bandwidth.
        overlap_slowdown: goes into the link.

    Returns:
        Latency in seconds, bandwidth in bytes per second, and the rows. Where the rows show no bandwidth (all of them
        bound by latency), the bandwidth is the best that any row reached: more is possible, but was not seen.

    Raises:
        SpecError: fewer than two rows.
    """
    flat = [row for row in rows if row.nodes in (1, row.ranks)]
    if len(flat) < FEWEST_ROWS:
        raise SpecError(
            f"two unknowns cannot be fitted to {len(flat)} measured rows.",
            field="measurements",
            hint="measure at least two sizes.",
        )
    latency, bandwidth = _solve(flat)
    return Link(
        latency_seconds=latency,
        bandwidth_bytes_per_second=bandwidth,
        relative_residual=residual(latency, bandwidth, flat),
        fits=tuple(_fits(flat)),
        overlap_slowdown=overlap_slowdown,
        measurements=tuple(rows),
    )


def fit_levels(
    rows: Sequence[LinkMeasurement],
    slowdowns: Mapping[bool, float],
    pipeline_slowdown: float | None = None,
) -> Links:
    """The links inside and between nodes, each from the rows of its level.

    Args:
        rows: of both levels.
        slowdowns: `Link.overlap_slowdown` by whether the groups span several nodes; a level may be missing.
        pipeline_slowdown: of the link inside a node.
    """
    levels = {
        across: [row for row in rows if (row.nodes > 1) is across]
        for across in (False, True)
    }
    found = {
        across: fit(level, overlap_slowdown=slowdowns.get(across)) if level else None
        for across, level in levels.items()
    }
    inside = found[False]
    if inside is not None:
        inside = inside.model_copy(update={"pipeline_slowdown": pipeline_slowdown})
    return Links(intra_node=inside, inter_node=found[True])


def _fits(rows: Sequence[LinkMeasurement]) -> Iterator[LinkFit]:
    """One fit per operation that has enough rows, in order of first appearance."""
    for operation in dict.fromkeys(row.operation for row in rows):
        own = [row for row in rows if row.operation == operation]
        if len(own) >= FEWEST_ROWS:
            latency, bandwidth = _solve(own)
            yield LinkFit(
                operation=operation,
                latency_seconds=latency,
                bandwidth_bytes_per_second=bandwidth,
                relative_residual=residual(latency, bandwidth, own),
            )


def _solve(rows: Sequence[LinkMeasurement]) -> tuple[float, float]:
    """Latency and bandwidth that minimise (4)."""
    terms = [Term(*factors_of(row), row.seconds) for row in rows]
    ratios = [term.hops / term.bytes for term in terms]
    least, largest = NEGLIGIBLE * min(ratios), max(ratios) / NEGLIGIBLE
    ratio = _root(terms, least, largest)
    latency = _best_latency(terms, ratio)
    bandwidth = (
        max(term.bytes / term.seconds for term in terms)
        if ratio == least
        else 1.0 / (ratio * latency)
    )
    return 0.0 if ratio == largest else latency, bandwidth


def residual(
    latency_seconds: float,
    bandwidth_bytes_per_second: float,
    rows: Sequence[LinkMeasurement],
) -> float:
    """Root mean square of log(predicted / measured) over the rows: 0.1 is typically 10 % off."""
    errors = [
        math.log(
            predict(latency_seconds, bandwidth_bytes_per_second, row) / row.seconds
        )
        for row in rows
    ]
    return math.sqrt(math.fsum(error * error for error in errors) / len(errors))


def predict(
    latency_seconds: float, bandwidth_bytes_per_second: float, row: LinkMeasurement
) -> float:
    """Seconds that equations (1) to (3) give for the exchange of a row."""
    hops, moved_bytes = factors_of(row)
    return hops * latency_seconds + moved_bytes / bandwidth_bytes_per_second


def factors_of(row: LinkMeasurement) -> tuple[float, float]:
    """What multiplies latency (hops) and inverse bandwidth (bytes) in equations (1) to (3)."""
    steps = row.ranks - 1
    match row.operation:
        case "all_reduce":
            return 2.0 * steps, 2.0 * steps / row.ranks * row.bytes
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return float(steps), steps / row.ranks * row.bytes
        case "broadcast" | "point_to_point":
            return 1.0, float(row.bytes)


def _root(terms: Sequence[Term], least: float, largest: float) -> float:
    """The ratio that solves (6); the end of the range that comes closest, where none inside does."""
    if _slope(terms, least) >= 0:
        return least
    if _slope(terms, largest) <= 0:
        return largest
    low, high = math.log(least), math.log(largest)
    while low < (middle := (low + high) / 2) < high:
        low, high = (
            (middle, high) if _slope(terms, math.exp(middle)) < 0 else (low, middle)
        )
    return math.exp(middle)


def _slope(terms: Sequence[Term], ratio: float) -> float:
    """Left side of (6)."""
    rising = math.fsum(term.bytes / term.seconds for term in terms)
    total = math.fsum(term.over_latency(ratio) / term.seconds for term in terms)
    falling = math.fsum(
        term.seconds * term.bytes / term.over_latency(ratio) ** 2 for term in terms
    )
    inverse = math.fsum(term.seconds / term.over_latency(ratio) for term in terms)
    return rising / total - falling / inverse


def _best_latency(terms: Sequence[Term], ratio: float) -> float:
    """Equation (5)."""
    total = math.fsum(term.over_latency(ratio) / term.seconds for term in terms)
    inverse = math.fsum(term.seconds / term.over_latency(ratio) for term in terms)
    return math.sqrt(inverse / total)
