"""Health, readiness and metrics."""

from __future__ import annotations

import importlib
import sqlite3

from fastapi import APIRouter, Response

from planner.api.dependencies import Services, ServicesDependency
from planner.api.documents import Health, Readiness
from planner.api.errors import NotReadyError
from planner.api.metrics import MEDIA_TYPE
from planner.version import __version__

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def get_health() -> Health:
    """Return 200 if the service is alive."""
    return Health(version=__version__)


@router.get("/readyz")
def get_readiness(parts: ServicesDependency) -> Readiness:
    """Return 200 if the database, the search and the queue are available, else 503."""
    _check_store(parts)
    _check_search()
    waiting = parts.solvers.waiting
    if not parts.solvers.has_capacity:
        raise NotReadyError(
            f"{waiting} jobs are waiting.",
            hint="try again later, or use another replica.",
            limits={"queue_length": parts.settings.queue_length},
            retry_after_seconds=1,
        )
    return Readiness(queue_length=waiting, running=parts.solvers.running)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
def get_metrics(parts: ServicesDependency) -> Response:
    """Return the metrics in Prometheus' text format."""
    text = parts.metrics.text(
        queue_length=parts.solvers.waiting, running=parts.solvers.running
    )
    return Response(text, media_type=MEDIA_TYPE)


def _check_store(parts: Services) -> None:
    try:
        parts.store.check_writable()
    except sqlite3.Error as error:
        raise NotReadyError(
            f"the database cannot be written: {error}.",
            hint="check its disk.",
            retry_after_seconds=10,
        ) from None


def _check_search() -> None:
    try:
        importlib.import_module("planner.search")
    except ImportError as error:
        raise NotReadyError(
            f"the search cannot be loaded: {error}.",
            hint="install planner with its dependencies.",
            retry_after_seconds=10,
        ) from None
