"""Calibrations that clients send, or that are fitted to the stored measured runs."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from planner.api.calibration import add_calibration, stored_calibration
from planner.api.dependencies import (
    ClientDependency,
    RootDependency,
    ServicesDependency,
)
from planner.api.documents import CalibrationCreate, CalibrationFit, PageQuery
from planner.api.http.bodies import DocumentRoute
from planner.api.http.caching import (
    FOREVER,
    NOT_MODIFIED,
    cacheable,
    check_if_match,
    tag_of,
)
from planner.api.http.cursors import read_page
from planner.api.planning import fit, while_connected
from planner.api.storage.store import CalibrationRow
from planner.spec import CalibrationTable
from planner.spec.answers import CalibrationPage, CalibrationSummary

logger = logging.getLogger("planner.api")

router = APIRouter(
    prefix="/v1/calibrations", tags=["calibrations"], route_class=DocumentRoute
)

CalibrationId = Annotated[str, Path(description="Id of the calibration, its sha256.")]
STORED_BEFORE = {
    "model": CalibrationSummary,
    "description": "The calibration was stored before.",
}


@router.post("", status_code=201, responses={200: STORED_BEFORE})
async def create_calibration(
    body: CalibrationCreate,
    request: Request,
    response: Response,
    parts: ServicesDependency,
    client: ClientDependency,
    root: RootDependency,
) -> CalibrationSummary:
    """Store a calibration; with `name` alone, fit it to the measured runs of this service.

    The id is the sha256 of the calibration, so that equal ones have equal ids. Others of
    the same name are further versions of it. A request for a plan or a prediction names
    one by `calibration_id`.
    """
    table = body.root
    if isinstance(table, CalibrationFit):
        table = await while_connected(request, fit(parts, table.name, client))
    found, is_new = await run_in_threadpool(add_calibration, parts.store, table)
    if not is_new:
        response.status_code = 200
    response.headers["Location"] = f"/v1/calibrations/{found}"
    row, _ = await run_in_threadpool(stored_calibration, parts.store, found)
    return _summary(row, root)


@router.get("")
def list_calibrations(
    parts: ServicesDependency,
    root: RootDependency,
    query: Annotated[PageQuery, Query()],
) -> CalibrationPage:
    """List calibrations, newest first; `next` is the cursor of the next page."""
    rows, cursor = read_page(parts.store.calibrations, query.cursor, query.limit)
    summaries = tuple(_summary(row, root) for row in rows)
    return CalibrationPage(calibrations=summaries, next=cursor)


@router.get(
    "/{calibration_id}", response_model=CalibrationTable, responses=NOT_MODIFIED
)
def get_calibration(
    calibration_id: CalibrationId, request: Request, parts: ServicesDependency
) -> Response:
    """Return a stored calibration."""
    _, document = stored_calibration(parts.store, calibration_id)
    return cacheable(
        request, document, media_type="application/json", cache_control=FOREVER
    )


@router.delete("/{calibration_id}", status_code=204, response_class=Response)
def delete_calibration(
    calibration_id: CalibrationId, request: Request, parts: ServicesDependency
) -> None:
    """Delete a calibration. Plans keep the calibration that they were made with."""
    row, document = stored_calibration(parts.store, calibration_id)
    check_if_match(request, tag_of(document.encode()))
    parts.store.delete_calibration(calibration_id)
    logger.info("calibration %s: deleted version %d", row.id, row.version)


def _summary(row: CalibrationRow, root: str) -> CalibrationSummary:
    return CalibrationSummary(
        id=row.id,
        name=row.name,
        version=row.version,
        measured_runs=row.measured_runs,
        created_at=row.created_at,
        url=f"{root}/v1/calibrations/{row.id}",
    )
