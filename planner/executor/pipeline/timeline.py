"""Records when this rank ran which action, and apart from that, how long it waited for a neighbour before.

On CUDA the marks are events on the compute stream, read after the step; on CPU they are readings of the monotonic
clock. All times are seconds since the start of the step, where a barrier lets every rank begin together.

A wait is what the receiver can see of a transfer: under gloo the host waits until the tensor is there, under NCCL the
compute stream does. It may begin long before the tensor is sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One recorded action."""

    name: str
    start_seconds: float
    end_seconds: float


def computing_seconds(spans: Sequence[Span]) -> float:
    """In actions of the schedule, whose names end with a micro-batch; `reduce` and `optimizer` are none."""
    return sum(
        span.end_seconds - span.start_seconds
        for span in spans
        if span.name[-1].isdigit()
    )


class Recorder:
    """Times the actions of one step; does nothing between steps that are not recorded."""

    def __init__(self, device: torch.device) -> None:
        self._clock = _CudaClock() if device.type == "cuda" else _HostClock()
        self._marks: list[tuple[str, object, object]] = []
        self._waits: list[tuple[str, object, object]] = []
        self._open: tuple[str, object] | None = None
        self._origin: object = None
        self.waits: tuple[Span, ...] = ()
        """Of the step that was ended last, by the action that waited."""

    @property
    def doing(self) -> str | None:
        """Name of the action that has started and not ended; None between actions."""
        return None if self._open is None else self._open[0]

    def begin_step(self) -> None:
        """Start recording; every time counts from here."""
        self._marks.clear()
        self._waits.clear()
        self._open = None
        self._origin = self._clock.mark()

    def end_step(self) -> tuple[Span, ...]:
        """Stop recording and return the step's actions in the order in which they started."""
        origin, self._origin = self._origin, None
        if origin is None:
            return ()
        self.waits = self._spans(origin, self._waits)
        return self._spans(origin, self._marks)

    def _spans(
        self, origin: object, marks: Sequence[tuple[str, object, object]]
    ) -> tuple[Span, ...]:
        since = self._clock.seconds_between
        return tuple(
            Span(name, since(origin, start), since(origin, end))
            for name, start, end in marks
        )

    def start(self, name: str) -> None:
        """An action starts now."""
        if self._origin is not None:
            self._open = (name, self._clock.mark())

    def stop(self) -> None:
        """The action that was started last ends now."""
        if self._open is not None:
            self._marks.append((*self._open, self._clock.mark()))
            self._open = None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record the body as one action."""
        self.start(name)
        yield
        self.stop()

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Record the body as the wait of an action for a tensor of another rank."""
        start = None if self._origin is None else self._clock.mark()
        yield
        if start is not None:
            self._waits.append((name, start, self._clock.mark()))


class _HostClock:
    def mark(self) -> object:
        return time.perf_counter()

    def seconds_between(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start


class _CudaClock:
    def mark(self) -> object:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds_between(self, start: object, end: object) -> float:
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000.0
