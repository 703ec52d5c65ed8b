"""Metrics of services and workers, which prometheus_client writes in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from planner.errors import DocumentError

SOLVE_SECONDS_BUCKETS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
MEDIA_TYPE = prometheus_client.CONTENT_TYPE_PLAIN_0_0_4

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class SolverMetrics:
    """What a process that runs jobs counts. Each object has a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.solves = Counter(
            "planner_solves", "Finished jobs by status.", ["status"], registry=registry
        )
        self.failures = Counter(
            "planner_failures",
            "Failed jobs and predictions by problem code.",
            ["code"],
            registry=registry,
        )
        self.solve_seconds = Histogram(
            "planner_solve_seconds",
            "Run time of a solver process in seconds.",
            buckets=SOLVE_SECONDS_BUCKETS,
            registry=registry,
        )
        self._running = Gauge(
            "planner_running_solves", "Running solver processes.", registry=registry
        )

    @property
    def mean_solve_seconds(self) -> float:
        """Mean run time of a solver process; 0 before the first."""
        total, count = (
            self._registry.get_sample_value(f"planner_solve_seconds_{part}") or 0.0
            for part in ("sum", "count")
        )
        return total / count if count else 0.0

    @contextmanager
    def served(
        self, host: str, port: int, running: Callable[[], int]
    ) -> Iterator[None]:
        """Serve the metrics on another port, at every path, until the block ends.

        Args:
            host: address to listen on.
            port: to listen on.
            running: returns the number of solver processes that run now.

        Raises:
            DocumentError: the port cannot be used.
        """
        self._running.set_function(running)
        try:
            server, thread = prometheus_client.start_http_server(
                port, addr=host, registry=self._registry
            )
        except OSError as error:
            raise DocumentError(
                f"cannot listen on {host}:{port}: {error.strerror}.",
                field="metrics_port",
                hint="give a free port, or 0 for no metrics.",
            ) from None
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class Metrics(SolverMetrics):
    """The metrics of one service."""

    def __init__(self) -> None:
        super().__init__()
        registry = self._registry
        self.plan_requests = Counter(
            "planner_plan_requests", "Requests for plans.", registry=registry
        )
        self.cache_hits = Counter(
            "planner_cache_hits",
            "Requests answered from stored plans.",
            registry=registry,
        )
        self.problems = Counter(
            "planner_problems",
            "Problem documents sent, by code.",
            ["code"],
            registry=registry,
        )
        self.swept = Counter(
            "planner_swept_rows",
            "Rows deleted for their age, by table.",
            ["table"],
            registry=registry,
        )
        self._queue_length = Gauge(
            "planner_queue_length", "Jobs that wait for a process.", registry=registry
        )

    def count_known_plan(self) -> None:
        """Count a request for a plan that was known."""
        self.plan_requests.inc()
        self.cache_hits.inc()

    def text(self, *, queue_length: int, running: int) -> bytes:
        """All metrics in the text format."""
        self._queue_length.set(queue_length)
        self._running.set(running)
        return prometheus_client.generate_latest(self._registry)
