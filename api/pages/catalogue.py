"""Pages of the catalogues: models and devices, each with a link to the form."""

from __future__ import annotations

from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner.api.pages.form_fields import node_of
from planner.api.pages.html import Element, Node, link, page, table, tag
from planner.profiler.catalogue import entry, names
from planner.spec.devices import CatalogueDevice, catalogue
from planner.spec.units import gibibytes, scaled

router = APIRouter()

UNKNOWN = "–"


@router.get("/models")
def show_models(request: Request) -> HTMLResponse:
    """Models, smallest first."""
    head = ("Model", "Family", "Parameters", "Layers", "Longest sequence", "Source")
    rows = [_model(name) for name in names()]
    return page(
        request,
        "Models",
        _as_json("/v1/models"),
        table("Smallest first", head, rows, numbers=(2, 3, 4)),
    )


@router.get("/devices")
def show_devices(request: Request) -> HTMLResponse:
    """Devices with their usual nodes."""
    head = (
        "Device",
        "Vendor",
        "Memory",
        "bf16 or fp16",
        "Memory bandwidth",
        "Per node",
        "In the node",
        "Between nodes",
    )
    rows = map(_device, catalogue().values())
    caption = "Dense peak rates; bandwidths of one device in one direction"
    return page(
        request,
        "Devices",
        _as_json("/v1/devices"),
        table(caption, head, rows, numbers=range(2, 8)),
    )


def _model(name: str) -> tuple[Node, ...]:
    found = entry(name)
    answers = {"model": name, "sequence": min(found.longest_sequence, 4096)}
    return (
        link(f"/plan?{urlencode(answers)}", name),
        found.family,
        scaled(found.parameters),
        str(found.layers),
        str(found.longest_sequence or UNKNOWN),
        found.citation,
    )


def _device(device: CatalogueDevice) -> tuple[Node, ...]:
    spec, peaks = device.spec, device.spec.peak_flops_per_second
    answers = {"devices": node_of(spec.id)}
    return (
        link(f"/plan?{urlencode(answers)}", spec.id),
        device.vendor,
        gibibytes(spec.memory_bytes),
        _rate(peaks.get("bf16") or peaks.get("fp16"), "FLOP/s"),
        _rate(spec.memory_bandwidth_bytes_per_second, "B/s"),
        str(device.devices_per_node),
        _rate(device.intra_node.bandwidth_bytes_per_second, "B/s"),
        _rate(
            device.inter_node.bandwidth_bytes_per_second if device.inter_node else None,
            "B/s",
        ),
    )


def _rate(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else scaled(value, unit)


def _as_json(address: str) -> Element:
    return tag("p", link(address, "as JSON"))
