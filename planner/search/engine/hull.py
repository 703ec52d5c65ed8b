"""The lower hull of saved bytes and time of recompute modes."""

from __future__ import annotations


def lower_hull(points: set[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lower hull of (bytes, time), from the shortest time to fewest bytes."""
    hull: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: (each[1], each[0])):
        if hull and point[0] >= hull[-1][0]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(
    first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]
) -> bool:
    """Return whether a point is not below the line between its neighbours."""
    share = (first[0] - middle[0]) / (first[0] - last[0])
    return middle[1] >= first[1] + share * (last[1] - first[1])
