"""Pages of the catalogues: models and devices, each with a link to the form."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner.api.pages.rendering import page
from planner.profiler.catalogue import entry, names
from planner.spec.devices import catalogue

router = APIRouter()


@router.get("/models")
def show_models(request: Request) -> HTMLResponse:
    """Models, smallest first."""
    return page(request, "models.html", models=list(map(entry, names())))


@router.get("/devices")
def show_devices(request: Request) -> HTMLResponse:
    """Devices with their usual nodes."""
    return page(request, "devices.html", devices=list(catalogue().values()))
