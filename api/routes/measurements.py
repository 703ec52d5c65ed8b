"""Measured runs of all plans, for calibration."""

from __future__ import annotations

from fastapi import APIRouter, Response

from planner.api.calibration import rows_text
from planner.api.dependencies import ServicesDependency

router = APIRouter(prefix="/v1", tags=["measurements"])


@router.get(
    "/measurements.csv",
    response_class=Response,
    responses={200: {"content": {"text/csv": {}}}},
)
def get_measurements_csv(parts: ServicesDependency) -> Response:
    """Return every measured run of a catalogue transformer, for `planner calibrate`."""
    return Response(rows_text(parts.store.measured_plans()), media_type="text/csv")
