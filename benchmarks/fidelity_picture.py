"""Predicted against measured time as an SVG picture, one colour per family."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960
HEIGHT = 720
LEFT = 84
RIGHT = 250
TOP = 44
BOTTOM = 60
RADIUS = 2.6
BAND = 0.1
"""Relative error up to which a point is in the grey band."""
GREY = "#374151"
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
COLOURS = (
    "#332288",
    "#88ccee",
    "#44aa99",
    "#117733",
    "#999933",
    "#ddcc77",
    "#cc6677",
    "#882255",
    "#aa4499",
    "#e07b00",
    "#111827",
    "#1f6feb",
    "#ff6fb5",
    "#7c4a03",
    "#9be000",
    "#6b7280",
    "#00c2c7",
    "#b00020",
    "#5b2a86",
    "#0f766e",
)
"""Paul Tol's muted palette, which colour-blind people can distinguish, and others."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    family: str
    name: str
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class _Scale:
    """Decades of both axes, as powers of ten."""

    low: int
    high: int

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return LEFT + self._share(value) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        return HEIGHT - BOTTOM - self._share(value) * (HEIGHT - TOP - BOTTOM)

    def _share(self, value: float) -> float:
        inside = min(max(math.log10(value), self.low), self.high)
        return (inside - self.low) / (self.high - self.low)


def svg(points: Sequence[Point], *, title: str, unit: str) -> str:
    """Return a picture without external resources; a point shows its run on hover.

    Args:
        points: at least one, with positive values.
        title: text above the picture.
        unit: of both axes.
    """
    scale = _scale(points)
    families = sorted({point.family for point in points})
    colours = {}
    for index, family in enumerate(families):
        colours[family] = COLOURS[index % len(COLOURS)]
    marks = [_mark(point, scale, colours[point.family]) for point in points]
    counts = Counter(point.family for point in points)
    parts = [
        *_head(title),
        *_grid(scale, unit),
        *_diagonal(scale),
        *marks,
        *_legend(counts, colours),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _scale(points: Sequence[Point]) -> _Scale:
    values = [point.measured for point in points]
    values += [point.predicted for point in points]
    low = math.floor(math.log10(min(values)))
    high = math.floor(math.log10(max(values))) + 1
    return _Scale(low, high)


def _head(title: str) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" font-size="12" '
        'role="img">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    heading = ' font-size="15" font-weight="600"'
    yield _text(LEFT, 26, title, fill="#111827", more=heading)


def _grid(scale: _Scale, unit: str) -> Iterator[str]:
    bottom = HEIGHT - BOTTOM
    right = WIDTH - RIGHT
    for power in range(scale.low, scale.high + 1):
        value = 10.0**power
        x = scale.x(value)
        y = scale.y(value)
        lines = f"M{x:.1f} {TOP}V{bottom}M{LEFT} {y:.1f}H{right}"
        yield f'<path d="{lines}" stroke="#e5e7eb"/>'
        yield _text(x, bottom + 18, f"{value:g}", anchor="middle")
        yield _text(LEFT - 8, y + 4, f"{value:g}", anchor="end")
    yield _text((LEFT + right) / 2, HEIGHT - 18, f"measured, {unit}", anchor="middle")
    middle = (TOP + bottom) / 2
    turned = f' transform="rotate(-90 22 {middle:g})"'
    yield _text(22, middle, f"predicted, {unit}", anchor="middle", more=turned)


def _diagonal(scale: _Scale) -> Iterator[str]:
    """The line of correct predictions, and the band around it."""
    low = 10.0**scale.low
    high = 10.0**scale.high
    corners = (
        (low, low * (1 + BAND)),
        (high / (1 + BAND), high),
        (high, high * (1 - BAND)),
        (low / (1 - BAND), low),
    )
    path = "L".join(f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in corners)
    title = f"<title>within {BAND:.0%}</title>"
    yield f'<path d="M{path}Z" fill="#f1f1ee">{title}</path>'
    start = f"{scale.x(low):.1f} {scale.y(low):.1f}"
    end = f"{scale.x(high):.1f} {scale.y(high):.1f}"
    yield f'<path d="M{start}L{end}" stroke="#9ca3af" fill="none"/>'


def _mark(point: Point, scale: _Scale, colour: str) -> str:
    error = point.predicted / point.measured - 1
    words = (
        f"{point.family} {point.name}\n"
        f"measured {point.measured:g}, predicted {point.predicted:g} ({error:+.1%})"
    )
    x = scale.x(point.measured)
    y = scale.y(point.predicted)
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}" fill="{colour}" '
        f'fill-opacity="0.7"><title>{escape(words)}</title></circle>'
    )


def _legend(counts: Mapping[str, int], colours: Mapping[str, str]) -> Iterator[str]:
    x = WIDTH - RIGHT + 22
    for row, (family, colour) in enumerate(colours.items()):
        y = TOP + 10 + 20 * row
        yield f'<circle cx="{x}" cy="{y}" r="4.5" fill="{colour}"/>'
        yield _text(x + 12, y + 4, f"{family} ({counts[family]})")
    band = f"grey: within {BAND:.0%}"
    yield _text(WIDTH - RIGHT + 14, HEIGHT - BOTTOM, band, fill="#6b7280")


def _text(
    x: float,
    y: float,
    text: str,
    *,
    fill: str = GREY,
    anchor: str = "start",
    more: str = "",
) -> str:
    attributes = f'text-anchor="{anchor}" fill="{fill}"{more}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'
