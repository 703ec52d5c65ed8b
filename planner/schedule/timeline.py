"""Timelines for tools and for eyes: Chrome trace, SVG picture, HTML page, terminal text.

All take several timelines, such as the predicted and the measured one of a step, and set them side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
MICROSECONDS = 1e6
_PLACES = ("micro_batch", "sequence_chunk")


def chrome_trace(traces: Sequence[Timeline]) -> dict[str, Any]:
    """A trace for ui.perfetto.dev or chrome://tracing, as plain data for JSON.

    One process per timeline and rank, with one thread for compute, one for transfers or, where they were measured, for
    the waits for them, and a counter of what the rank holds; times in microseconds. Source: "Trace Event Format",
    complete events (``X``), counters (``C``) and metadata (``M``).
    """
    rows = [
        (trace, f"{trace.title} {name}", rank, curve)
        for trace in traces
        for name, rank, curve in zip(
            trace.rank_names, trace.ranks, trace.memory or ((),) * len(trace.ranks), strict=True
        )
    ]
    events: list[dict[str, Any]] = []
    for process, (trace, name, rank, curve) in enumerate(rows):
        events += _names(process, name, rank)
        events += (_complete(process, event) for event in rank)
        events += (_counter(process, trace.memory_unit, seconds, held) for seconds, held in curve)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(process: int, name: str, rank: Sequence[TimelineEvent]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": COMPUTE, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": COMPUTE, "args": {"sort_index": process}}
    threads = {"compute": COMPUTE}
    for kind, words in ((EventKind.TRANSFER, "transfers"), (EventKind.WAIT, "waits for tensors")):
        if any(event.kind is kind for event in rank):
            threads[words] = TRANSFERS
    for thread, number in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": thread}}


def _complete(process: int, event: TimelineEvent) -> dict[str, Any]:
    action = event.action
    return {
        "ph": "X",
        "name": event.label,
        "cat": event.kind.value,
        "pid": process,
        "tid": TRANSFERS if event.kind in BESIDE_COMPUTE else COMPUTE,
        "ts": event.start_seconds * MICROSECONDS,
        "dur": (event.end_seconds - event.start_seconds) * MICROSECONDS,
        "args": {"stage": action.stage, **dict(zip(_PLACES, event.place, strict=False))} if action else {},
    }


def _counter(process: int, unit: str, seconds: float, held: float) -> dict[str, Any]:
    return {"ph": "C", "name": "held", "pid": process, "ts": seconds * MICROSECONDS, "args": {unit: held}}
