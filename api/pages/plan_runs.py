"""The prediction next to measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.api.calibration import stored_run
from planner.api.pages.html import Element, Node, link, moment, table, tag
from planner.api.store import MeasurementRow
from planner.spec import Plan
from planner.spec.units import gibibytes, percent, scaled, seconds


def runs(plan: Plan, measured: Sequence[MeasurementRow]) -> Element:
    """The prediction, then every run, newest first."""
    if not measured:
        command = tag("code", "planner run plan.json --report URL")
        return tag("p", "No measured runs yet. Report one with ", command, ".")
    head = (
        *("", "Step", "Slower by", "Throughput"),
        *("Peak memory", "Steps", "Devices", "Reported"),
    )
    rows = [tuple(_predicted(plan)), *(tuple(_run(plan, row)) for row in measured)]
    return table(
        "Medians of the steps after warm-up", head, rows, numbers=(1, 2, 3, 4, 5)
    )


def _predicted(plan: Plan) -> Iterator[Node]:
    prediction = plan.prediction
    peak = max(rank.peak_bytes for rank in prediction.memory)
    rate = scaled(prediction.tokens_per_second, "/s")
    yield from (
        "predicted",
        seconds(prediction.step_seconds),
        "",
        rate,
        gibibytes(peak),
        "",
        "",
        "",
    )


def _run(plan: Plan, row: MeasurementRow) -> Iterator[Node]:
    run = stored_run(row.document)
    place = link(f"/v1/plans/{plan.id}/measurements/{row.id}", f"run {row.id}")
    if run is None:
        yield from (place, "not valid", "", "", "", "", "", moment(row.created_at))
        return
    peak = max((rank.peak_bytes for rank in run.ranks), default=None)
    yield place
    yield seconds(run.median_step_seconds)
    yield percent(run.median_step_seconds / plan.prediction.step_seconds - 1)
    yield scaled(run.tokens_per_second, "/s")
    yield "unknown" if peak is None else gibibytes(peak)
    yield from (str(run.steps), run.devices, moment(row.created_at))
