"""Metrics in Prometheus' text format."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from planner.api.metrics import Metrics


def values(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Every sample by its name and the values of its labels."""
    text = metrics.text(queue_length=3, running=2).decode()
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_solver_seconds_are_counted_in_buckets() -> None:
    """Each bucket counts what is at most its bound; the mean is that of all values."""
    metrics = Metrics()
    assert metrics.mean_solve_seconds == 0
    for seconds in (0.05, 0.1, 5.0, 2000.0):
        metrics.solve_seconds.observe(seconds)
    found = values(metrics)
    bucket = "planner_solve_seconds_bucket"
    assert found[bucket, ("0.1",)] == 2
    assert found[bucket, ("10.0",)] == 3
    assert found[bucket, ("+Inf",)] == found["planner_solve_seconds_count", ()] == 4
    assert metrics.mean_solve_seconds == 2005.15 / 4


def test_counters_are_kept_by_label() -> None:
    """One row per set of labels, zero before the first; gauges are those of now."""
    metrics = Metrics()
    assert values(metrics)["planner_cache_hits_total", ()] == 0
    for status in ("succeeded", "failed", "succeeded"):
        metrics.solves.labels(status=status).inc()
    found = values(metrics)
    assert found["planner_solves_total", ("succeeded",)] == 2
    assert found["planner_solves_total", ("failed",)] == 1
    assert found["planner_queue_length", ()] == 3
    assert found["planner_running_solves", ()] == 2


def test_services_count_apart() -> None:
    """Two services in one process, as in tests, have counters of their own."""
    first, second = Metrics(), Metrics()
    first.cache_hits.inc()
    assert values(second)["planner_cache_hits_total", ()] == 0
