"""Metrics of the service, in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SOLVE_SECONDS_BUCKETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class Counter:
    """A counter, with one value per set of labels."""

    def __init__(self, name: str, description: str) -> None:
        self.name, self.description = name, description
        self._values: dict[tuple[tuple[str, str], ...], int] = {}
        self._lock = threading.Lock()

    def add(self, amount: int = 1, /, **labels: str) -> None:
        """Add `amount` to the counter."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def lines(self) -> Iterator[str]:
        """Lines of the text format."""
        yield from _header(self.name, self.description, "counter")
        with self._lock:
            values = dict(self._values)
        for labels, value in sorted(values.items()) or [((), 0)]:
            yield f"{self.name}{_braces(labels)} {value}"


class Histogram:
    """A histogram of durations in seconds."""

    def __init__(self, name: str, description: str, bounds: tuple[float, ...]) -> None:
        self.name, self.description, self._bounds = name, description, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, seconds: float) -> None:
        """Add one value."""
        index = next(
            (i for i, bound in enumerate(self._bounds) if seconds <= bound),
            len(self._bounds),
        )
        with self._lock:
            self._counts[index] += 1
            self._sum += seconds

    @property
    def mean(self) -> float:
        """Mean of all values; 0 before the first."""
        count = sum(self._counts)
        return self._sum / count if count else 0.0

    def lines(self) -> Iterator[str]:
        """Lines of the text format: cumulative buckets, sum and count."""
        yield from _header(self.name, self.description, "histogram")
        with self._lock:
            counts, total = list(self._counts), self._sum
        below = 0
        for bound, count in zip((*self._bounds, "+Inf"), counts, strict=True):
            below += count
            yield f'{self.name}_bucket{{le="{bound}"}} {below}'
        yield f"{self.name}_sum {total}"
        yield f"{self.name}_count {below}"


class Metrics:
    """The metrics of the service."""

    def __init__(self) -> None:
        self.plan_requests = Counter(
            "planner_plan_requests_total", "Requests for plans."
        )
        self.cache_hits = Counter(
            "planner_cache_hits_total", "Requests answered from stored plans."
        )
        self.solves = Counter("planner_solves_total", "Finished jobs by status.")
        self.problems = Counter(
            "planner_problems_total", "Problem documents sent, by code."
        )
        self.failures = Counter(
            "planner_failures_total", "Failed jobs and predictions by problem code."
        )
        self.swept = Counter(
            "planner_swept_rows_total", "Rows deleted for their age, by table."
        )
        self.solve_seconds = Histogram(
            "planner_solve_seconds",
            "Run time of a solver process in seconds.",
            SOLVE_SECONDS_BUCKETS,
        )

    def text(self, *, queue_length: int, running: int) -> str:
        """All metrics in the text format."""
        rows = [
            *_gauge(
                "planner_queue_length", "Jobs that wait for a process.", queue_length
            )
        ]
        rows += _gauge("planner_running_solves", "Running solver processes.", running)
        for metric in self._counters():
            rows += metric.lines()
        rows += self.solve_seconds.lines()
        return "\n".join(rows) + "\n"

    def _counters(self) -> tuple[Counter, ...]:
        return (
            self.plan_requests,
            self.cache_hits,
            self.solves,
            self.problems,
            self.failures,
            self.swept,
        )


def _gauge(name: str, description: str, value: int) -> Iterator[str]:
    yield from _header(name, description, "gauge")
    yield f"{name} {value}"


def _header(name: str, description: str, kind: str) -> Iterator[str]:
    yield f"# HELP {name} {description}"
    yield f"# TYPE {name} {kind}"


def _braces(labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return ""
    # Codes and statuses are identifiers of this program: nothing to escape.
    pairs = (f'{name}="{value}"' for name, value in labels)
    return "{" + ",".join(pairs) + "}"
