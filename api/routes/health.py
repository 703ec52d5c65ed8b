"""Health, readiness and metrics."""

from __future__ import annotations

import importlib

from fastapi import APIRouter, Response

from planner.api.dependencies import Services, ServicesDependency
from planner.api.documents import Health, Readiness
from planner.api.errors import NotReadyError
from planner.api.metrics import MEDIA_TYPE
from planner.api.storage.database import StoreError
from planner.version import __version__

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def get_health() -> Health:
    """Return 200 if the service is alive."""
    return Health(version=__version__)


@router.get("/readyz")
def get_readiness(parts: ServicesDependency) -> Readiness:
    """Return 200 if the database and the search are available, else 503."""
    _check_store(parts)
    _check_search()
    counts = parts.jobs.counts()
    return Readiness(queue_length=counts.queued, running=counts.running)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}},
)
def get_metrics(parts: ServicesDependency) -> Response:
    """Return the metrics in Prometheus' text format."""
    counts = parts.jobs.counts()
    text = parts.metrics.text(queue_length=counts.queued, running=counts.running)
    return Response(text, media_type=MEDIA_TYPE)


def _check_store(parts: Services) -> None:
    try:
        parts.store.check_writable()
    except StoreError as error:
        raise NotReadyError(
            f"the database cannot be written: {error.orig}.",
            hint="check its disk, or its server.",
            retry_after_seconds=10,
        ) from None
    if parts.jobs.unstored:
        raise NotReadyError(
            f"the database does not accept the results of {parts.jobs.unstored} jobs.",
            hint="check its disk, or its server; the service keeps trying.",
            retry_after_seconds=10,
        )


def _check_search() -> None:
    try:
        importlib.import_module("planner.search")
    except ImportError as error:
        raise NotReadyError(
            f"the search cannot be loaded: {error}.",
            hint="install planner with its dependencies.",
            retry_after_seconds=10,
        ) from None
