"""The picture of predicted against measured times."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from benchmarks.fidelity_picture import COLOURS, Point, svg

SVG = "{http://www.w3.org/2000/svg}"


def circles(text: str) -> list[ElementTree.Element]:
    """Return points and marks of the legend."""
    return list(ElementTree.fromstring(text).iter(f"{SVG}circle"))


def test_positions_of_points() -> None:
    """A correct prediction is on the diagonal, one that is too high above it."""
    points = [
        Point("a", "x", 1.0, 1.0),
        Point("a", "y", 10.0, 10.0),
        Point("a", "z", 1.0, 10.0),
    ]
    marks = circles(svg(points, title="times", unit="seconds"))[:3]
    x = [float(mark.attrib["cx"]) for mark in marks]
    y = [float(mark.attrib["cy"]) for mark in marks]
    assert x[2] == x[0] < x[1]
    assert y[2] == y[1] < y[0]


def test_one_colour_per_family() -> None:
    """Points and legend have the family's colour, and the legend counts the points."""
    points = []
    for index in range(len(COLOURS)):
        points.append(Point(f"family{index}", "x", 1.0, 2.0 + index))
    text = svg(points, title="times", unit="seconds")
    fills = [mark.attrib["fill"] for mark in circles(text)]
    of_points = fills[: len(COLOURS)]
    of_legend = fills[len(COLOURS) :]
    assert len(set(of_points)) == len(COLOURS)
    assert sorted(of_points) == sorted(of_legend)
    assert "family0 (1)" in text


def test_names_are_escaped() -> None:
    """Words of a row cannot break the picture."""
    text = svg([Point("a<b", 'x"&y', 1.0, 1.5)], title="<times>", unit="s & s")
    titles = ElementTree.fromstring(text).findall(f"{SVG}title")
    assert [title.text for title in titles] == ["<times>"]
    assert "+50.0%" in text
