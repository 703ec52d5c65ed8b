"""Predictions: step time and memory of one layout."""

from __future__ import annotations

from fastapi import APIRouter, Request

from planner.api.dependencies import ClientDependency, ServicesDependency
from planner.api.documents import PredictionCreate
from planner.api.http.bodies import DocumentRoute
from planner.api.http.body_errors import errors_as_sent, long_prediction
from planner.api.planning import predict, while_connected
from planner.spec import Forecast

router = APIRouter(
    prefix="/v1/predictions", tags=["predictions"], route_class=DocumentRoute
)


@router.post("")
async def create_prediction(
    body: PredictionCreate,
    request: Request,
    parts: ServicesDependency,
    client: ClientDependency,
) -> Forecast:
    """Predict step time and memory of one layout. Send `layout` with `model`, `devices`,
    `batch` and `sequence`, or with documents.

    Without `layers_per_stage` the layers are divided in the best way. The service stores
    nothing.
    """
    with errors_as_sent(body):
        forecast = predict(parts, long_prediction(body), client)
        return await while_connected(request, forecast)
