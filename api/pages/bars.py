"""Bars in SVG, next to the numbers that they show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.api.pages.html import Element, tag

# Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#56b4e9", "#d55e00", "#f0e442"),
)
GREY = "#8a8f98"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a bar."""

    label: str
    colour: str
    length: float
    """In the unit of the whole bar."""
    length_text: str
    """The length with its unit."""


def bar(part: Part, whole: float) -> Element:
    """One part of a whole; screen readers skip it, because its number is next to it."""
    return _svg(
        [_rect(0, 100 * part.length / whole if whole > 0 else 0, part)],
        aria_hidden="true",
    )


def stack(parts: Sequence[Part], whole: float, limit: float, label: str) -> Element:
    """Parts one after the other, and a line at the limit.

    Args:
        parts: in order.
        whole: length of the full width.
        limit: position of the line.
        label: text for screen readers.
    """
    shapes, left = [], 0.0
    for part in parts:
        width = 100 * part.length / whole if whole > 0 else 0.0
        shapes.append(_rect(left, width, part))
        left += width
    at = min(100 * limit / whole, 99.7) if whole > 0 else 0.0
    line = tag(
        "rect", x=f"{at:.2f}", y="0", width="0.3", height="10", fill="currentColor"
    )
    return _svg([*shapes, line], role="img", aria_label=label)


def keys(parts: Iterable[Part]) -> Element:
    """The legend of the colours."""
    return tag(
        "ul",
        *(tag("li", key(part.colour), part.label) for part in parts),
        class_="keys",
    )


def key(colour: str) -> Element:
    """A spot of a colour."""
    spot = tag("rect", width="10", height="10", fill=colour)
    return tag("svg", spot, class_="key", viewBox="0 0 10 10", aria_hidden="true")


def _rect(left: float, width: float, part: Part) -> Element:
    title = tag("title", f"{part.label}: {part.length_text}")
    return tag(
        "rect",
        title,
        x=f"{left:.2f}",
        y="0",
        width=f"{width:.2f}",
        height="10",
        fill=part.colour,
    )


def _svg(shapes: Sequence[Element], **attributes: str) -> Element:
    return tag(
        "svg",
        *shapes,
        class_="bar",
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        **attributes,
    )
