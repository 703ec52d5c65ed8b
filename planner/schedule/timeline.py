"""Timelines for tools and for eyes: Chrome trace, SVG picture, HTML page, terminal text.

All take several timelines, such as the predicted and the measured one of a step, and set them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from planner.schedule.ascii import ascii
from planner.schedule.events import (
    BESIDE_COMPUTE,
    EventKind,
    Timeline,
    TimelineEvent,
    from_measured,
    from_simulation,
)
from planner.schedule.page import html
from planner.schedule.picture import svg

__all__ = [
    "EventKind",
    "Timeline",
    "TimelineEvent",
    "ascii",
    "chrome_trace",
    "from_measured",
    "from_simulation",
    "html",
    "svg",
]

COMPUTE, TRANSFERS = 0, 1
TICKS_PER_MICROSECOND = 8
"""Times are whole eighths of a microsecond: neighbours then touch in doubles, in decimals, and in the nanoseconds that
Perfetto makes of them, and never overlap by a rounding."""
_HALF_NANOSECOND = 5e-10
"""Predicted times are whole nanoseconds: rounded down from half of one above, no two sums of one time differ."""
_PLACES = ("micro_batch", "sequence_chunk")


def chrome_trace(traces: Sequence[Timeline]) -> dict[str, Any]:
    """A trace for ui.perfetto.dev or chrome://tracing, as plain data for JSON.

    One process per timeline and rank, with one thread for compute, one for transfers or, where they were measured, for
    the waits for them, and a counter of what the rank holds; times in microseconds. Source: "Trace Event Format",
    complete events (``X``), counters (``C``) and metadata (``M``). Its complete events of one thread must nest, so that
    transfers which overlap have a thread for each that is on its way at once.
    """
    rows = [
        (trace, f"{trace.title} {name}", rank, curve)
        for trace in traces
        for name, rank, curve in zip(
            trace.rank_names,
            trace.ranks,
            trace.memory or ((),) * len(trace.ranks),
            strict=True,
        )
    ]
    events: list[dict[str, Any]] = []
    for process, (trace, name, rank, curve) in enumerate(rows):
        placed = tuple(_placed(rank))
        events += _names(process, name, placed)
        events += (_complete(process, event, thread) for event, thread in placed)
        events += (
            _counter(process, trace.memory_unit, seconds, held)
            for seconds, held in curve
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _microseconds(seconds: float) -> float:
    return (
        math.floor((seconds + _HALF_NANOSECOND) * 1e6 * TICKS_PER_MICROSECOND)
        / TICKS_PER_MICROSECOND
    )


def _placed(rank: Sequence[TimelineEvent]) -> Iterator[tuple[TimelineEvent, int]]:
    """Every event of a rank and its thread: for those beside compute, the first that is free by then."""
    free: list[float] = []
    for event in sorted(rank, key=attrgetter("start_seconds", "end_seconds")):
        if event.kind not in BESIDE_COMPUTE:
            yield event, COMPUTE
            continue
        start = _microseconds(event.start_seconds)
        lane = next(
            (number for number, since in enumerate(free) if since <= start), len(free)
        )
        free[lane : lane + 1] = [_microseconds(event.end_seconds)]
        yield event, TRANSFERS + lane


def _names(
    process: int, name: str, placed: Sequence[tuple[TimelineEvent, int]]
) -> Iterator[dict[str, Any]]:
    yield {
        "ph": "M",
        "name": "process_name",
        "pid": process,
        "tid": COMPUTE,
        "args": {"name": name},
    }
    yield {
        "ph": "M",
        "name": "process_sort_index",
        "pid": process,
        "tid": COMPUTE,
        "args": {"sort_index": process},
    }
    waits = any(event.kind is EventKind.WAIT for event, _ in placed)
    for thread in sorted({COMPUTE, *(thread for _, thread in placed)}):
        words = (
            "compute"
            if thread == COMPUTE
            else "waits for tensors"
            if waits
            else "transfers"
        )
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": thread,
            "args": {"name": words},
        }


def _complete(process: int, event: TimelineEvent, thread: int) -> dict[str, Any]:
    action = event.action
    start, end = _microseconds(event.start_seconds), _microseconds(event.end_seconds)
    return {
        "ph": "X",
        "name": event.label,
        "cat": event.kind.value,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": {"stage": action.stage, **dict(zip(_PLACES, event.place, strict=False))}
        if action
        else {},
    }


def _counter(process: int, unit: str, seconds: float, held: float) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": "held",
        "pid": process,
        "ts": _microseconds(seconds),
        "args": {unit: held},
    }
