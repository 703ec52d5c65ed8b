"""Is the service up, can it take work, and what has it done?"""

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
    """The process answers."""
    return Health(version=__version__)


@router.get("/readyz")
def get_readiness(parts: ServicesDependency) -> Readiness:
    """The database can be written, the search can be loaded (and is, from now on), the queue has room; else 503."""
    _check_store(parts)
    _check_search()
    waiting = parts.solvers.waiting
    if not parts.solvers.has_room:
        raise NotReadyError(
            f"{waiting} solves are waiting.",
            hint="try again later, or another replica.",
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
    """Counters in Prometheus' text format."""
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
            hint="look after its disk.",
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
