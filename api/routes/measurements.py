"""What all runs came to, as calibration takes it."""

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
    """Every stored run of a catalogue transformer, one row each, for `planner calibrate --measurements`."""
    return Response(rows_text(parts.store.measured_plans()), media_type="text/csv")
