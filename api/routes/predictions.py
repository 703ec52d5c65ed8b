"""Predictions: step time and memory of one layout."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body
from fastapi.concurrency import run_in_threadpool

from planner.api.bodies import DocumentRoute
from planner.api.body_errors import errors_as_sent, long_prediction
from planner.api.dependencies import ClientDependency, ServicesDependency
from planner.api.documents import LongPredictionCreate, PredictionCreate
from planner.api.errors import NotReadyError
from planner.api.examples import LONG_PREDICTION, SHORT_PREDICTION, openapi_examples
from planner.api.profiles import ResolvedProfile
from planner.api.solver import PredictTask
from planner.spec import Forecast

router = APIRouter(
    prefix="/v1/predictions", tags=["predictions"], route_class=DocumentRoute
)


@router.post("")
async def create_prediction(
    body: Annotated[
        PredictionCreate,
        Body(openapi_examples=openapi_examples(SHORT_PREDICTION, LONG_PREDICTION)),
    ],
    parts: ServicesDependency,
    client: ClientDependency,
) -> Forecast:
    """Predict step time and memory of one layout. Send `layout` with `model`, `devices`,
    `batch` and `sequence`, or with documents.

    Without `layers_per_stage` the layers are divided in the best way. The service stores
    nothing.
    """
    with errors_as_sent(body):
        return await _predict(long_prediction(body), parts, client)


async def _predict(
    request: LongPredictionCreate, parts: ServicesDependency, client: str
) -> Forecast:
    resolved = await run_in_threadpool(parts.profiles.resolve, request)
    answer = await parts.solvers.run(
        parts.solvers.admit(client),
        lambda: _task(request, resolved),
        seconds=parts.settings.max_solver_seconds,
        on_progress=lambda report: None,
    )
    if not isinstance(answer, Forecast):
        raise NotReadyError(
            "the service is stopping.",
            hint="try again in a moment.",
            retry_after_seconds=1,
        )
    return answer


def _task(request: LongPredictionCreate, resolved: ResolvedProfile) -> PredictTask:
    return PredictTask(
        resolved.profile,
        request.cluster,
        request.job,
        request.layout,
        resolved.model,
        request.calibration,
    )
