"""A timeline as text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from planner.schedule.events import BESIDE_COMPUTE, EventKind, Timeline, TimelineEvent
from planner.schedule.units import common_axis, format_seconds

LETTERS = {
    EventKind.RECOMPUTE: "R",
    EventKind.REDUCE: "Reduce",
    EventKind.OPTIMIZER: "Optimizer",
    EventKind.OTHER: "?",
}
"""How bars that are no action begin."""


def ascii(traces: Sequence[Timeline], width: int = 100) -> str:
    """Every rank as one line of `width` columns: ``F3---`` is the forward of micro-batch 3, dots are bubbles.

    ``F3.1`` is the forward of its second sequence chunk.

    All timelines share one time axis. Bars narrower than their name lose its end, and a bar narrower than a column
    shows only where no other one begins. Transfers are not drawn.
    """
    axis = common_axis(traces)
    lines = []
    for trace in traces:
        lines.append(
            f"{trace.title}: {format_seconds(trace.step_seconds)} per step, bubble {trace.bubble_fraction:.1%}"
        )
        margin = max(map(len, trace.rank_names), default=0)
        for name, events in zip(trace.rank_names, trace.ranks, strict=True):
            lines.append(
                f"{name:>{margin}} |{_row(events, axis.start_seconds, width / axis.seconds, width)}|"
            )
    return "\n".join(lines)


def _row(
    events: Sequence[TimelineEvent],
    origin: float,
    columns_per_second: float,
    width: int,
) -> str:
    cells = ["."] * width
    for event in events:
        if event.kind in BESIDE_COMPUTE:
            continue
        first = min(
            round((event.start_seconds - origin) * columns_per_second), width - 1
        )
        last = max(
            first + 1,
            min(round((event.end_seconds - origin) * columns_per_second), width),
        )
        if last - first == 1 and cells[first] != ".":
            continue
        cells[first:last] = _name(event).ljust(last - first, "-")[: last - first]
    return "".join(cells)


def _name(event: TimelineEvent) -> str:
    name = LETTERS.get(event.kind, event.kind.value)
    return name + event.short if event.action else name
