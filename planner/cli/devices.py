"""`planner devices`: the catalogue of devices, by the figures of their data sheets."""

from __future__ import annotations

import argparse
from typing import Any

from planner.cli.arguments import add_json
from planner.cli.console import data, table, to_json
from planner.cli.units import gibibytes, scaled
from planner.spec.devices import CatalogueDevice, catalogue


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every device."""
    devices = catalogue().values()
    if arguments.json:
        data(to_json([_document(device) for device in devices]))
        return 0
    header = (
        "id",
        "name",
        "memory",
        "bf16 or fp16 peak",
        "memory bandwidth",
        "per node",
        "in the node",
        "between nodes",
    )
    data(table(header, [_row(device) for device in devices], left=(0, 1)))
    return 0


def _row(device: CatalogueDevice) -> tuple[str, ...]:
    spec = device.spec
    peak = max(spec.peak_flops_per_second.values(), default=None)
    return (
        spec.id,
        spec.name,
        gibibytes(spec.memory_bytes),
        _rate(peak, "FLOP/s"),
        _rate(spec.memory_bandwidth_bytes_per_second, "B/s"),
        str(device.devices_per_node),
        _rate(device.intra_node.bandwidth_bytes_per_second, "B/s"),
        _rate(device.inter_node.bandwidth_bytes_per_second if device.inter_node else None, "B/s"),
    )


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else scaled(value, unit)


def _document(device: CatalogueDevice) -> dict[str, Any]:
    return {
        **device.spec.model_dump(mode="json"),
        "vendor": device.vendor,
        "architecture": device.architecture,
        "devices_per_node": device.devices_per_node,
        "scale_up_link": device.scale_up_link,
        "intra_node": device.intra_node.model_dump(mode="json"),
        "inter_node": device.inter_node.model_dump(mode="json") if device.inter_node else None,
        "confidence": device.confidence,
    }
