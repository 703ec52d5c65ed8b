"""Catalogues of models and devices, and the schemas of all documents."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from planner.api.errors import NotFoundError
from planner.profiler.catalogue import entry, names
from planner.spec import SCHEMAS, DeviceSpec, Document, Link
from planner.spec.devices import CatalogueDevice, catalogue

router = APIRouter(prefix="/v1", tags=["catalogue"])


class ModelView(Document):
    """A catalogue model."""

    name: str
    """Name in requests."""
    family: str
    """Family of the model."""
    parameters: int
    """Elements, shared parameters counted once."""
    layers: int
    """Layers that a plan places, embedding and output layer included."""
    longest_sequence: int
    """Tokens; 0 for models without a sequence."""
    citation: str
    """Publication of the sizes."""


class ModelList(Document):
    """All catalogue models, smallest first."""

    models: tuple[ModelView, ...]
    """Every model."""


class DeviceView(Document):
    """A catalogue device and its usual node."""

    id: str
    """Identifier, as in `device` of a node group."""
    vendor: str
    """Manufacturer."""
    architecture: str
    """Generation of the device; calibrated constants belong to it."""
    spec: DeviceSpec
    """Data sheet."""
    devices_per_node: int
    """Devices of a usual node."""
    intra_node: Link
    """Links inside a usual node."""
    inter_node: Link | None
    """Links between usual nodes; None: unknown."""
    confidence: str
    """How well the figures are documented."""


class DeviceList(Document):
    """All catalogue devices."""

    devices: tuple[DeviceView, ...]
    """Every device."""


@router.get("/models")
def list_models() -> ModelList:
    """List the catalogue models, smallest first."""
    return ModelList(models=tuple(map(_model_view, names())))


@router.get("/devices")
def list_devices() -> DeviceList:
    """List the catalogue devices."""
    return DeviceList(
        devices=tuple(_device_view(device) for device in catalogue().values())
    )


@router.get("/schemas/{name}")
def get_schema(
    name: Annotated[str, Path(description="Name of the document, such as plan.")],
) -> dict[str, Any]:
    """Return the JSON Schema of a document."""
    kind = SCHEMAS.get(name)
    if kind is None:
        raise NotFoundError(
            f"there is no schema {name!r}.",
            field="name",
            hint=f"use one of {', '.join(SCHEMAS)}.",
        )
    return kind.model_json_schema(by_alias=True)


def _model_view(name: str) -> ModelView:
    found = entry(name)
    return ModelView.model_validate(
        {field: getattr(found, field) for field in ModelView.model_fields}
    )


def _device_view(device: CatalogueDevice) -> DeviceView:
    return DeviceView(
        id=device.spec.id,
        vendor=device.vendor,
        architecture=device.architecture,
        spec=device.spec,
        devices_per_node=device.devices_per_node,
        intra_node=device.intra_node,
        inter_node=device.inter_node,
        confidence=device.confidence,
    )
