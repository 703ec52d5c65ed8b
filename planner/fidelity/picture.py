"""Predicted against measured as an SVG picture: both axes logarithmic, one colour per family."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 960, 720
LEFT, RIGHT, TOP, BOTTOM = 84, 250, 44, 60
RADIUS = 2.6
BAND = 0.1
"""Relative error up to which a point lies in the grey band."""

# Tol's muted palette, which the colour-blind can tell apart; then others, as far from these as there is room.
COLOURS = (
    *(
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
    ),
    *(
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
    ),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One run."""

    family: str
    name: str
    measured: float
    predicted: float


@dataclass(frozen=True, slots=True)
class _Scale:
    """The same decades on both axes, so that the diagonal is where the prediction is right."""

    low: float
    high: float
    """Powers of ten."""

    def x(self, value: float) -> float:
        return LEFT + self._share(value) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - self._share(value) * (HEIGHT - TOP - BOTTOM)

    def _share(self, value: float) -> float:
        inside = min(max(math.log10(value), self.low), self.high)
        return (inside - self.low) / (self.high - self.low)


def svg(points: Sequence[Point], *, title: str, unit: str) -> str:
    """A picture without outside resources; hover over a point to read it.

    Args:
        points: with positive values.
        title: stands above the picture.
        unit: of both axes.

    Raises:
        ValueError: there is no point.
    """
    values = [value for point in points for value in (point.measured, point.predicted)]
    scale = _Scale(
        math.floor(math.log10(min(values))), math.floor(math.log10(max(values))) + 1
    )
    families = sorted({point.family for point in points})
    colours = {
        family: COLOURS[index % len(COLOURS)] for index, family in enumerate(families)
    }
    parts = [*_head(title), *_grid(scale, unit), *_diagonal(scale)]
    parts += [_mark(point, scale, colours[point.family]) for point in points]
    parts += _legend(points, colours)
    return "\n".join([*parts, "</svg>", ""])


def _head(title: str) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" role="img">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield _text(
        LEFT, 26, title, fill="#111827", more=' font-size="15" font-weight="600"'
    )


def _grid(scale: _Scale, unit: str) -> Iterator[str]:
    for power in range(int(scale.low), int(scale.high) + 1):
        x, y = scale.x(10.0**power), scale.y(10.0**power)
        yield f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>'
        yield _text(x, HEIGHT - BOTTOM + 18, f"{10.0**power:g}", anchor="middle")
        yield _text(LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end")
    yield _text(
        (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, f"measured, {unit}", anchor="middle"
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f' transform="rotate(-90 22 {middle:g})"'
    yield _text(22, middle, f"predicted, {unit}", anchor="middle", more=turned)


def _diagonal(scale: _Scale) -> Iterator[str]:
    """The line of right predictions, and the band around it."""
    low, high = 10.0**scale.low, 10.0**scale.high
    corners = (
        (low, low * (1 + BAND)),
        (high / (1 + BAND), high),
        (high, high * (1 - BAND)),
        (low / (1 - BAND), low),
    )
    path = "L".join(f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in corners)
    yield f'<path d="M{path}Z" fill="#f1f1ee"><title>within {BAND:.0%}</title></path>'
    ends = f"M{scale.x(low):.1f} {scale.y(low):.1f}L{scale.x(high):.1f} {scale.y(high):.1f}"
    yield f'<path d="{ends}" stroke="#9ca3af" fill="none"/>'


def _mark(point: Point, scale: _Scale, colour: str) -> str:
    error = point.predicted / point.measured - 1
    words = f"{point.family} {point.name}\nmeasured {point.measured:g}, predicted {point.predicted:g} ({error:+.1%})"
    centre = f'cx="{scale.x(point.measured):.1f}" cy="{scale.y(point.predicted):.1f}"'
    return f'<circle {centre} r="{RADIUS}" fill="{colour}" fill-opacity="0.7"><title>{escape(words)}</title></circle>'


def _legend(points: Sequence[Point], colours: dict[str, str]) -> Iterator[str]:
    for row, (family, colour) in enumerate(colours.items()):
        y, x = TOP + 10 + 20 * row, WIDTH - RIGHT + 22
        yield f'<circle cx="{x}" cy="{y}" r="4.5" fill="{colour}"/>'
        yield _text(
            x + 12,
            y + 4,
            f"{family} ({sum(point.family == family for point in points)})",
        )
    yield _text(
        WIDTH - RIGHT + 14, HEIGHT - BOTTOM, f"grey: within {BAND:.0%}", fill="#6b7280"
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    fill: str = "#374151",
    anchor: str = "start",
    more: str = "",
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"{more}>{escape(text)}</text>'
