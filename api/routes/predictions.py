"""Predictions: time and memory of one given layout."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from planner.api.dependencies import ClientDependency, ServicesDependency
from planner.api.documents import PredictionCreate
from planner.api.errors import NotReadyError
from planner.api.profiles import ResolvedProfile
from planner.api.solver import PredictTask
from planner.spec import Forecast

router = APIRouter(prefix="/v1/predictions", tags=["predictions"])


@router.post("")
async def create_prediction(
    body: PredictionCreate, parts: ServicesDependency, client: ClientDependency
) -> Forecast:
    """Predict one layout; without `layers_per_stage`, its best stage map. Nothing is stored."""
    resolved = await run_in_threadpool(parts.profiles.resolve, body)
    answer = await parts.solvers.run(
        parts.solvers.admit(client),
        lambda: _task(body, resolved),
        seconds=parts.settings.max_solver_seconds,
        on_progress=lambda report: None,
    )
    if not isinstance(answer, Forecast):
        raise NotReadyError(
            "the service is stopping.",
            hint="ask again in a moment.",
            retry_after_seconds=1,
        )
    return answer


def _task(body: PredictionCreate, resolved: ResolvedProfile) -> PredictTask:
    return PredictTask(
        resolved.profile, body.cluster, body.job, body.layout, resolved.model
    )
