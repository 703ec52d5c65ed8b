"""`planner devices`: the catalogue of devices by the figures of their data sheets, one of them, or the user's own."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from planner.cli.arguments import add_json
from planner.cli.console import data, table, to_json
from planner.cost.compute import matmul_fraction
from planner.errors import SpecError
from planner.spec import DeviceSpec, Link, ScaleUp, read
from planner.spec.calibration import ANY, OURS, Constants, constants_for, shipped
from planner.spec.devices import CatalogueDevice, catalogue, find_entry, link_within
from planner.spec.profile import Operation
from planner.spec.units import gibibytes, percent, scaled

DOMAIN = {
    "switch": "behind a switch",
    "mesh": "in a mesh",
    "ring": "in a ring",
    "pcie": "over PCIe",
}
MATRIX_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Rows, columns and inner size of the products whose efficiency is told."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "device",
        nargs="?",
        metavar="ID",
        help="show this device, each figure with its source",
    )
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="check a device document of your own (YAML, TOML or JSON)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every device, one of them, or the device of a file."""
    if arguments.device is not None and arguments.file is not None:
        raise SpecError(
            "one device at a time.", field="--file", hint="leave out the id, or --file."
        )
    if arguments.file is not None:
        spec = read(DeviceSpec, arguments.file)
        known = catalogue().get(spec.id)
        data(
            to_json(spec)
            if arguments.json
            else _sheet(spec, known.architecture if known else "")
        )
    elif arguments.device is not None:
        device = find_entry(arguments.device)
        data(
            to_json(_document(device))
            if arguments.json
            else _sheet(device.spec, device.architecture)
        )
    else:
        devices = catalogue().values()
        data(
            to_json([_document(device) for device in devices])
            if arguments.json
            else _table(devices)
        )
    return 0


def _table(devices: Any) -> str:
    header = (
        "id",
        "bf16 or fp16",
        "fp8",
        "memory",
        "bandwidth",
        "scale-up links",
        "per node",
        "in node",
        "between nodes",
    )
    return table(header, [_row(device) for device in devices], left=(0, 5))


def _row(device: CatalogueDevice) -> tuple[str, ...]:
    spec = device.spec
    peaks = spec.peak_flops_per_second
    return (
        spec.id,
        _rate(peaks.get("bf16") or peaks.get("fp16"), "FLOP/s"),
        _rate(peaks.get("fp8"), "FLOP/s"),
        gibibytes(spec.memory_bytes),
        _rate(spec.memory_bandwidth_bytes_per_second, "B/s"),
        _domain(spec.scale_up) if spec.scale_up else "-",
        str(device.devices_per_node),
        _rate(device.intra_node.bandwidth_bytes_per_second, "B/s"),
        _rate(_bandwidth(device.inter_node), "B/s"),
    )


def _sheet(spec: DeviceSpec, architecture: str) -> str:
    """One line per figure, with where it stands; then what the planner assumes of its peak."""
    rows = [
        (name, value, spec.sources.get(field, "-"))
        for name, value, field in _figures(spec)
    ]
    figures = table(("figure", "value", "source"), rows, left=(0, 2))
    return f"{spec.id}: {spec.name}\n\n{figures}\n\n{_efficiency(spec, architecture)}"


def _efficiency(spec: DeviceSpec, architecture: str) -> str:
    """What large and small products reach, and what that stands on."""
    curve = _curve(spec, architecture)
    rows = [
        (str(size), percent(curve["fractions"][str(size)])) for size in MATRIX_SIZES
    ]
    head = ("product, m = n = k", "of the peak")
    return "\n".join(("assumed:\n", table(head, rows, left=()), "", curve["source"]))


def _curve(spec: DeviceSpec, architecture: str) -> dict[str, Any]:
    """What the cost model takes matrix products to reach of the peak, by size: equation (K1)."""
    constants = constants_for(OURS, architecture)
    fractions = {
        str(size): matmul_fraction(_product(size), spec, constants)
        for size in MATRIX_SIZES
    }
    return {"source": _told(spec, architecture, constants), "fractions": fractions}


def _told(spec: DeviceSpec, architecture: str, constants: Constants) -> str:
    """Where the curve comes from."""
    if not constants.matmul_edge:
        return f"the best matrix product's for all sizes ({spec.sources.get('achievable_fraction', 'as told')})"
    fitted = {
        one.architecture: one
        for one in shipped()
        if one.framework == ANY and one.constants.matmul_edge
    }
    if architecture in fitted:
        return f"fitted to runs of all frameworks on {architecture}; {fitted[architecture].source}"
    return f"nobody measured runs on {architecture}: the median of {', '.join(sorted(fitted))}"


def _product(size: int) -> Operation:
    """Of two square matrices."""
    return Operation(
        kind="matmul", count=1, flops=2 * size**3, bytes=0, m=size, n=size, k=size
    )


def _figures(spec: DeviceSpec) -> Iterator[tuple[str, str, str]]:
    """Name, value and field of everything that the data sheet tells."""
    for kind, peak in spec.peak_flops_per_second.items():
        yield f"dense peak, {kind}", scaled(peak, "FLOP/s"), "peak_flops_per_second"
    yield (
        "best matrix product",
        percent(spec.achievable_fraction),
        "achievable_fraction",
    )
    yield "memory", gibibytes(spec.memory_bytes), "memory_bytes"
    rates = (
        ("memory bandwidth", "memory_bandwidth_bytes_per_second"),
        ("to the host", "host_bandwidth_bytes_per_second"),
        ("between nodes", "network_bandwidth_bytes_per_second"),
    )
    for name, field in rates:
        if getattr(spec, field) is not None:
            yield name, scaled(getattr(spec, field), "B/s"), field
    if spec.scale_up is not None:
        yield (
            f"scale-up, {_domain(spec.scale_up)}",
            _rate(_bandwidth(link_within(spec, 1)), "B/s"),
            "scale_up",
        )
        yield (
            "scale-up, one pair",
            scaled(_pair_bandwidth(spec.scale_up), "B/s"),
            "scale_up",
        )
    if spec.price_per_hour is not None:
        yield "price of an hour", f"{spec.price_per_hour:g}", "price_per_hour"


def _domain(scale_up: ScaleUp) -> str:
    return f"{scale_up.domain_devices} {DOMAIN[scale_up.topology]}"


def _pair_bandwidth(scale_up: ScaleUp) -> float:
    return (
        scale_up.pair_bandwidth_bytes_per_second or scale_up.bandwidth_bytes_per_second
    )


def _bandwidth(link: Link | None) -> float | None:
    return link.bandwidth_bytes_per_second if link else None


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
        "inter_node": device.inter_node.model_dump(mode="json")
        if device.inter_node
        else None,
        "matrix_products": _curve(device.spec, device.architecture),
        "confidence": device.confidence,
    }
