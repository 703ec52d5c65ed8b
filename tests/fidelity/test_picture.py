"""The picture of predicted against measured."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from planner.fidelity.picture import COLOURS, Point, svg

SVG = "{http://www.w3.org/2000/svg}"


def circles(text: str) -> list[ElementTree.Element]:
    """Points and legend."""
    return list(ElementTree.fromstring(text).iter(f"{SVG}circle"))


def test_points_lie_where_they_should() -> None:
    """A right prediction lies on the diagonal, one too high above it; a decade is as wide anywhere."""
    points = [
        Point("a", "x", 1.0, 1.0),
        Point("a", "y", 10.0, 10.0),
        Point("a", "z", 1.0, 10.0),
    ]
    right, higher, too_high = circles(svg(points, title="times", unit="seconds"))[:3]
    x, y = (
        [float(one.get(axis, "nan")) for one in (right, higher, too_high)]
        for axis in ("cx", "cy")
    )
    assert x[2] == x[0] < x[1]
    assert y[2] == y[1] < y[0]


def test_one_colour_per_family() -> None:
    """Families have their own colours, points and legend alike, and the legend counts the points."""
    points = [
        Point(f"family{index}", "x", 1.0, 2.0 + index) for index in range(len(COLOURS))
    ]
    text = svg(points, title="times", unit="seconds")
    fills = [one.get("fill") for one in circles(text)]
    assert len(set(fills)) == len(COLOURS)
    assert sorted(map(str, fills[: len(COLOURS)])) == sorted(
        map(str, fills[len(COLOURS) :])
    )
    assert "family0 (1)" in text


def test_names_are_escaped() -> None:
    """Words of a row cannot break the picture."""
    text = svg([Point("a<b", 'x"&y', 1.0, 1.5)], title="<times>", unit="s & s")
    (title,) = [
        each for each in ElementTree.fromstring(text) if each.tag == f"{SVG}title"
    ]
    assert title.text == "<times>"
    assert "+50.0%" in text
