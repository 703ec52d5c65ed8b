"""Measured runs beside their predictions, and the errors behind every prediction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from planner.api.calibration import stored_run
from planner.api.dependencies import Services, ServicesDependency
from planner.api.http.cursors import read_page
from planner.api.pages.rendering import page
from planner.api.storage.store import PlanRow
from planner.spec.calibration import CalibrationTable, Residuals, shipped

router = APIRouter()

PLANS_PER_PAGE = 100
KNOWN = {
    "runtime": "runtime and architecture measured",
    "architecture": "architecture measured",
    "neither": "neither measured",
}
"""What the calibration knows from measured runs, in words."""
WIDEST_ERROR = 0.5
"""Relative error at the edges of the picture."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run and its prediction."""

    number: int
    plan: PlanRow
    measured_seconds: float
    predicted_seconds: float
    created_at: str

    @property
    def error(self) -> float:
        """measured / predicted - 1."""
        return self.measured_seconds / self.predicted_seconds - 1

    @property
    def height(self) -> float:
        """Place in the picture: 0 at the bottom, 1 at the top."""
        bounded = max(-WIDEST_ERROR, min(WIDEST_ERROR, self.error))
        return 0.5 + bounded / (2 * WIDEST_ERROR)


@dataclass(frozen=True, slots=True)
class Interval:
    """Where 80 % of the held-out runs lie, as measured / predicted."""

    words: str
    """What was measured before: the runtime on the architecture, the latter, neither."""
    quantity: str
    low: float
    high: float


@router.get("/runs")
def show_runs(
    request: Request,
    parts: ServicesDependency,
    cursor: Annotated[str | None, Query()] = None,
) -> HTMLResponse:
    """Measured runs of the newest plans, or of the plans before a cursor."""
    plans, older = read_page(parts.store.plans, cursor, PLANS_PER_PAGE)
    runs = [run for row in plans for run in _runs(parts, row)]
    runs.sort(key=lambda each: each.number)
    return page(request, "runs.html", runs=runs, older=older, widest=WIDEST_ERROR)


@router.get("/atlas")
def show_atlas(request: Request) -> HTMLResponse:
    """Published runs behind the calibration of this release, and their errors."""
    table = shipped()
    return page(
        request,
        "atlas.html",
        table=table,
        rows_of_runs=_rows(table),
        intervals=_intervals(table),
    )


def _runs(parts: Services, row: PlanRow) -> list[Run]:
    if row.step_seconds is None:
        return []
    found = []
    for each in parts.store.measurements(row.id):
        run = stored_run(each.document)
        if run is None:
            continue
        seconds = run.median_step_seconds
        found.append(Run(each.id, row, seconds, row.step_seconds, each.created_at))
    return found


def _rows(table: CalibrationTable) -> list[tuple[str, str, int, int]]:
    """Runtime, architecture, and the runs with a measured time and memory."""
    times = table.rows.runtime_architecture
    memories = table.memory.runtime_architecture
    found = []
    for name in sorted({*times, *memories}):
        runtime, _, architecture = name.partition(" x ")
        counts = times.get(name, 0), memories.get(name, 0)
        found.append((runtime, architecture, *counts))
    return found


def _intervals(table: CalibrationTable) -> list[Interval]:
    found = []
    for known, row in table.intervals.items():
        for quantity, residuals in (("step time", row.time), ("memory", row.memory)):
            found.append(_interval(KNOWN[known], quantity, residuals))
    return found


def _interval(words: str, quantity: str, residuals: Residuals) -> Interval:
    low, high = math.exp(residuals.low), math.exp(residuals.high)
    return Interval(words, quantity, low, high)
