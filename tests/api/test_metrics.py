"""Metrics in Prometheus' text format."""

from __future__ import annotations

from planner.api.metrics import Histogram, Metrics


def test_a_histogram_is_cumulative() -> None:
    """Each bucket counts what is at most its bound; the last counts all."""
    histogram = Histogram("seconds", "Seconds.", (1.0, 10.0))
    for seconds in (0.5, 1.0, 5.0, 50.0):
        histogram.observe(seconds)
    assert list(histogram.lines()) == [
        "# HELP seconds Seconds.",
        "# TYPE seconds histogram",
        'seconds_bucket{le="1.0"} 2',
        'seconds_bucket{le="10.0"} 3',
        'seconds_bucket{le="+Inf"} 4',
        "seconds_sum 56.5",
        "seconds_count 4",
    ]
    assert histogram.mean == 56.5 / 4


def test_counters_are_kept_by_label() -> None:
    """One row per set of labels, zero before the first."""
    metrics = Metrics()
    assert "planner_cache_hits_total 0\n" in metrics.text(queue_length=0, running=0)
    metrics.solves.add(status="succeeded")
    metrics.solves.add(status="failed")
    metrics.solves.add(status="succeeded")
    text = metrics.text(queue_length=3, running=2)
    assert (
        'planner_solves_total{status="failed"} 1\nplanner_solves_total{status="succeeded"} 2\n'
        in text
    )
    assert "planner_queue_length 3\n" in text
    assert "planner_running_solves 2\n" in text


def test_every_metric_has_its_type() -> None:
    """Each name is declared once, before its rows."""
    declared = [
        line.split()[2]
        for line in Metrics().text(queue_length=0, running=0).splitlines()
        if "# TYPE" in line
    ]
    assert len(declared) == len(set(declared)) == 9
