"""Timelines as an SVG picture: rows are ranks, bars are actions, hatched is idle time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from planner.schedule.events import BESIDE_COMPUTE, EventKind, Timeline, TimelineEvent
from planner.schedule.units import Axis, common_axis, format_held, format_seconds

LEFT, RIGHT, TOP, BOTTOM = 84, 24, 16, 16
TITLE_HEIGHT, ROW_HEIGHT, BAR_HEIGHT, STRIP_HEIGHT = 30, 30, 20, 4
MEMORY_HEIGHT = 18
"""Of the memory curve under a row."""
PANEL_GAP, AXIS_HEIGHT, LEGEND_HEIGHT = 14, 26, 22
DIGIT_WIDTH, LETTER_WIDTH = 6.2, 6.4
"""Of the small font, for deciding what fits; a little wide, so that text never leaves its bar."""


@dataclass(frozen=True, slots=True)
class Style:
    """How bars of one kind look."""

    words: str
    fill: str
    text: str = "#ffffff"


# Colours of Okabe and Ito's palette, which the colour-blind can tell apart.
STYLES = {
    EventKind.FORWARD: Style("forward", "#0072b2"),
    EventKind.BACKWARD: Style("backward", "#009e73"),
    EventKind.BACKWARD_INPUT: Style("backward, input gradient", "#00694d"),
    EventKind.BACKWARD_WEIGHT: Style("backward, weight gradient", "#e8b93b", "#111827"),
    EventKind.RECOMPUTE: Style("recompute", "#cc79a7"),
    EventKind.REDUCE: Style("gradient reduction", "#d55e00"),
    EventKind.OPTIMIZER: Style("optimizer", "#6b7280"),
    EventKind.TRANSFER: Style("transfer", "#7566c9"),
    EventKind.WAIT: Style("waiting for a tensor", "#c9b8e8", "#111827"),
    EventKind.OTHER: Style("other", "#a8adb5"),
}


MEMORY_FILL = "#b9c0cc"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where a time stands in the picture."""

    axis: Axis
    width: float

    def x(self, seconds: float) -> float:
        return (
            LEFT
            + (seconds - self.axis.start_seconds)
            * (self.width - LEFT - RIGHT)
            / self.axis.seconds
        )


def svg(traces: Sequence[Timeline], width: int = 1200) -> str:
    """One picture of all timelines on one time axis, without outside resources; hover over a bar to read it.

    The number in a bar is its micro-batch, ``3.1`` the second sequence chunk of one. Later stages of a rank are
    lighter. Hatched is idle time.
    Under each rank stands what it holds over time, on one scale for all ranks of a timeline.

    Args:
        traces: timelines, drawn one below the other.
        width: of the picture, in pixels.

    Raises:
        SpecError: there is no timeline.
    """
    scale = _Scale(common_axis(traces), width)
    panels, y = [], float(TOP)
    for trace in traces:
        panels += list(_panel(trace, scale, y))
        y += _panel_height(trace) + PANEL_GAP
    legend, legend_height = _legend(traces, width, y + AXIS_HEIGHT)
    height = y + AXIS_HEIGHT + legend_height + BOTTOM
    return "\n".join(
        [
            *_head(width, height, traces),
            *_axis(scale, TOP + TITLE_HEIGHT, y),
            *panels,
            *legend,
            "</svg>",
            "",
        ]
    )


def _head(width: float, height: float, traces: Sequence[Timeline]) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, '
        'sans-serif" font-size="11" role="img">'
    )
    yield f"<title>{escape(', '.join(trace.title for trace in traces))}</title>"
    yield (
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="#f6f6f4"/><rect width="1.2" height="6" fill="#dcdcd6"/></pattern></defs>'
    )
    yield f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'


def _axis(scale: _Scale, top: float, bottom: float) -> Iterator[str]:
    for seconds, text in scale.axis.ticks():
        x = scale.x(seconds)
        yield f'<path d="M{x:.2f} {top:g}V{bottom:g}" stroke="#e5e7eb"/>'
        yield _text(x, bottom + 14, text, anchor="middle", fill="#4b5563")
    yield f'<path d="M{LEFT} {bottom:g}H{scale.width - RIGHT:g}" stroke="#9ca3af"/>'


def _panel_height(trace: Timeline) -> float:
    return TITLE_HEIGHT + _row_height(trace) * len(trace.ranks)


def _row_height(trace: Timeline) -> float:
    return ROW_HEIGHT + (MEMORY_HEIGHT if trace.memory else 0)


def _panel(trace: Timeline, scale: _Scale, top: float) -> Iterator[str]:
    yield _text(
        LEFT,
        top + 18,
        trace.title,
        fill="#111827",
        more=' font-size="14" font-weight="600"',
    )
    whole = f"{format_seconds(trace.step_seconds)} per step, bubble {trace.bubble_fraction:.1%}"
    summary = trace.summary or whole
    yield _text(
        scale.width - RIGHT,
        top + 18,
        summary,
        anchor="end",
        fill="#374151",
        more=' font-size="12"',
    )
    for row, (name, events) in enumerate(
        zip(trace.rank_names, trace.ranks, strict=True)
    ):
        y = top + TITLE_HEIGHT + row * _row_height(trace)
        yield f'<g data-ranks="{row}">'  # pages dim all ranks but one
        yield _text(
            LEFT - 8, y + BAR_HEIGHT / 2 + 4, name, anchor="end", fill="#374151"
        )
        yield _rect(
            scale.x(trace.start_seconds),
            scale.x(trace.end_seconds),
            y,
            BAR_HEIGHT,
            'fill="url(#idle)"',
        )
        yield from _bars(events, scale, y)
        if trace.memory:
            yield from _memory(trace, row, scale, y + BAR_HEIGHT + STRIP_HEIGHT + 2)
        yield "</g>"


def _memory(trace: Timeline, row: int, scale: _Scale, top: float) -> Iterator[str]:
    """What a rank holds over time, as steps on one scale for all ranks of the timeline."""
    curve, most = (
        trace.memory[row],
        max((held for each in trace.memory for _, held in each), default=0),
    )
    if not most:
        return
    bottom = top + MEMORY_HEIGHT
    path = f"M{scale.x(trace.start_seconds):.2f} {bottom:g}"
    for seconds, held in curve:
        path += f"H{scale.x(seconds):.2f}V{bottom - MEMORY_HEIGHT * held / most:.2f}"
    path += f"H{scale.x(trace.end_seconds):.2f}V{bottom:g}Z"
    peak = format_held(max((held for _, held in curve), default=0), trace.memory_unit)
    words = f"{trace.rank_names[row]} holds at most {peak} {trace.memory_unit if trace.memory_unit == 'units' else ''}"
    yield f'<path class="memory" d="{path}" fill="{MEMORY_FILL}"><title>{escape(words.strip())}</title></path>'
    yield _text(
        LEFT - 8,
        bottom - 4,
        f"peak {peak}",
        anchor="end",
        fill="#6b7280",
        more=' font-size="10"',
    )


def _bars(events: Sequence[TimelineEvent], scale: _Scale, y: float) -> Iterator[str]:
    stages = sorted({action.stage for event in events if (action := event.action)})
    for event in events:
        left, right = scale.x(event.start_seconds), scale.x(event.end_seconds)
        is_beside = event.kind in BESIDE_COMPUTE
        top, height = (
            (y + BAR_HEIGHT + 2, STRIP_HEIGHT) if is_beside else (y, BAR_HEIGHT)
        )
        look = f'fill="{_fill(event, stages)}" stroke="#ffffff" stroke-width="{0.6 if right - left > 3 else 0}"'
        yield _rect(left, right, top, height, look, title=_hover(event))
        if event.kind not in (*BESIDE_COMPUTE, EventKind.RECOMPUTE):
            yield from _number(event, stages, left, right, y)


def _number(
    event: TimelineEvent, stages: Sequence[int], left: float, right: float, y: float
) -> Iterator[str]:
    text = event.short
    if (len(text) - text.count(".") / 2) * DIGIT_WIDTH + 2 > right - left:
        return
    fill = STYLES[event.kind].text if _lightness(event, stages) < 0.25 else "#111827"
    middle = (left + right) / 2
    yield _text(
        middle,
        y + BAR_HEIGHT / 2 + 4,
        text,
        anchor="middle",
        fill=fill,
        more=' pointer-events="none"',
    )


def _fill(event: TimelineEvent, stages: Sequence[int]) -> str:
    """The kind's colour, mixed with white for the later stages of the rank."""
    fill, white = STYLES[event.kind].fill, _lightness(event, stages)
    mixed = (
        round(int(fill[at : at + 2], 16) * (1 - white) + 255 * white)
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _lightness(event: TimelineEvent, stages: Sequence[int]) -> float:
    action = event.action
    return (
        0.4 * stages.index(action.stage) / (len(stages) - 1)
        if action and len(stages) > 1
        else 0.0
    )


def _hover(event: TimelineEvent) -> str:
    action = event.action
    what = STYLES[event.kind].words
    if action is not None:
        parts = zip(("micro-batch", "sequence chunk"), event.place, strict=False)
        what += f" of stage {action.stage}, " + ", ".join(
            f"{part} {number}" for part, number in parts
        )
    lasting = format_seconds(event.end_seconds - event.start_seconds)
    return (
        f"{event.label}: {what}\n"
        f"{format_seconds(event.start_seconds)} to {format_seconds(event.end_seconds)}, lasting {lasting}"
    )


def _legend(
    traces: Sequence[Timeline], width: float, top: float
) -> tuple[list[str], float]:
    """Swatches of the kinds that occur, and their height; they wrap when the picture is narrow."""
    present = {
        event.kind for trace in traces for events in trace.ranks for event in events
    }
    entries = [
        (f'fill="{style.fill}"', style.words)
        for kind, style in STYLES.items()
        if kind in present
    ]
    parts, x, y = [], float(LEFT), top + 8
    entries.append(('fill="url(#idle)" stroke="#dcdcd6"', "bubble"))
    if any(trace.memory for trace in traces):
        units = sorted({trace.memory_unit for trace in traces if trace.memory})
        entries.append((f'fill="{MEMORY_FILL}"', f"held, {' and '.join(units)}"))
    for look, words in entries:
        needed = 18 + len(words) * LETTER_WIDTH + 16
        if x > LEFT and x + needed > width:
            x, y = float(LEFT), y + LEGEND_HEIGHT
        parts += [
            _rect(x, x + 12, y, 12, look),
            _text(x + 18, y + 10, words, fill="#374151"),
        ]
        x += needed
    return parts, y - top + LEGEND_HEIGHT


def _rect(
    left: float, right: float, y: float, height: float, look: str, title: str = ""
) -> str:
    box = f'<rect x="{left:.2f}" y="{y:g}" width="{max(right - left, 0):.2f}" height="{height:g}" {look}'
    return f"{box}><title>{escape(title)}</title></rect>" if title else f"{box}/>"


def _text(
    x: float, y: float, text: str, *, fill: str, anchor: str = "start", more: str = ""
) -> str:
    return f'<text x="{x:.2f}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{more}>{escape(text)}</text>'
