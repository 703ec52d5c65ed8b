"""Measured runs of all plans, for calibration."""

from __future__ import annotations

from fastapi import APIRouter

from planner.api.calibration import stored_runs
from planner.api.dependencies import ServicesDependency
from planner.spec import Run

router = APIRouter(prefix="/v1", tags=["measurements"])


@router.get("/runs")
def list_runs(parts: ServicesDependency) -> list[Run]:
    """Return measured runs as run documents, for `planner calibrate`. Runs whose model
    is no decoder, and those on unlike devices, are left out.
    """
    measured = parts.store.measured_plans()
    return list(stored_runs(measured, parts.profiles.get))
