"""`planner devices`: list the devices of the catalogue, or show one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from planner.cli.console import data, table, to_json
from planner.cli.failures import DONE
from planner.cli.inputs import complete, device_names
from planner.cli.options import option, verb
from planner.cost.compute import matmul_fraction
from planner.errors import SpecError
from planner.spec import DeviceSpec, Link, ScaleUp, read
from planner.spec.calibration import MINIMUM_ROWS, constants_for, shipped
from planner.spec.devices import CatalogueDevice, catalogue, find_entry, link_within
from planner.spec.job import OURS
from planner.spec.units import percent, scaled

HEADER = (
    "id",
    "bf16/fp16",
    "fp8",
    "memory",
    "bandwidth",
    "scale-up",
    "per node",
    "in node",
    "between",
)
TOPOLOGY = {"switch": "switch", "mesh": "mesh", "ring": "ring", "pcie": "PCIe"}
MATRIX_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Rows, columns and inner size of the matrix products whose efficiency is shown."""
DATA_SHEET_RATES = (
    ("memory bandwidth", "memory_bandwidth_bytes_per_second"),
    ("host link", "host_bandwidth_bytes_per_second"),
    ("between nodes", "network_bandwidth_bytes_per_second"),
)


@verb("devices")
@click.argument(
    "identifier",
    required=False,
    metavar="[ID]",
    shell_complete=complete(device_names),
)
@option(
    "--file",
    "path",
    metavar="FILE",
    help="Check and show your own device document (YAML, TOML or JSON)",
)
def command(identifier: str | None, path: str | None, as_json: bool) -> int:
    """List the devices of the catalogue; with ID, show one with the source of each figure."""
    if identifier is not None and path is not None:
        raise SpecError(
            "cannot be combined with ID.", field="--file", hint="leave out one of them."
        )
    document: Any
    if path is not None:
        document = read(DeviceSpec, path)
        known = catalogue().get(document.id)
        text = _sheet(document, known.architecture if known is not None else "")
    elif identifier is not None:
        device = find_entry(identifier, field="ID")
        document, text = _document(device), _sheet(device.spec, device.architecture)
    else:
        devices = list(catalogue().values())
        document, text = list(map(_document, devices)), _table(devices)
    data(to_json(document) if as_json else text)
    return DONE


def _document(device: CatalogueDevice) -> dict[str, Any]:
    between = device.inter_node
    return {
        **device.spec.model_dump(mode="json"),
        "vendor": device.vendor,
        "architecture": device.architecture,
        "devices_per_node": device.devices_per_node,
        "scale_up_link": device.scale_up_link,
        "intra_node": device.intra_node.model_dump(mode="json"),
        "inter_node": None if between is None else between.model_dump(mode="json"),
        "matrix_products": _matrix_products(device.spec, device.architecture),
        "confidence": device.confidence,
    }


def _table(devices: Iterable[CatalogueDevice]) -> str:
    rows = []
    for device in devices:
        spec = device.spec
        within, between = device.intra_node, device.inter_node
        peaks = spec.peak_flops_per_second
        row = (
            spec.id,
            _rate(peaks.get("bf16") or peaks.get("fp16"), "FLOP/s"),
            _rate(peaks.get("fp8"), "FLOP/s"),
            scaled(spec.memory_bytes, "B"),
            _rate(spec.memory_bandwidth_bytes_per_second, "B/s"),
            _domain(spec.scale_up) if spec.scale_up is not None else "-",
            str(device.devices_per_node),
            scaled(within.bandwidth_bytes_per_second, "B/s"),
            _bandwidth(between),
        )
        rows.append(row)
    return table(HEADER, rows, left=(0, 5))


def _sheet(spec: DeviceSpec, architecture: str) -> str:
    """Every figure with its source, and the fraction of the peak that products reach."""
    figures = table(("figure", "value", "source"), _figures(spec), left=(0, 2))
    products = _matrix_products(spec, architecture)
    sizes = [str(size) for size in MATRIX_SIZES]
    fractions = [percent(products["fractions"][size]) for size in sizes]
    curve = table(("m = n = k", *sizes), [("of the peak", *fractions)])
    heading = f"matrix products, as the cost model assumes them: {products['source']}"
    return f"{spec.id}: {spec.name}\n\n{figures}\n\n{heading}\n\n{curve}"


def _figures(spec: DeviceSpec) -> list[tuple[str, str, str]]:
    """Name, value and source of every figure of the data sheet."""
    rows = []

    def add(name: str, value: str, field: str) -> None:
        rows.append((name, value, spec.sources.get(field, "-")))

    for kind, peak in spec.peak_flops_per_second.items():
        add(f"dense peak, {kind}", scaled(peak, "FLOP/s"), "peak_flops_per_second")
    fraction = percent(spec.achievable_fraction)
    add("best matrix product", fraction, "achievable_fraction")
    add("memory", scaled(spec.memory_bytes, "B"), "memory_bytes")
    for name, field in DATA_SHEET_RATES:
        rate = getattr(spec, field)
        if rate is not None:
            add(name, scaled(rate, "B/s"), field)
    scale_up = spec.scale_up
    if scale_up is not None:
        pair = scale_up.pair_bandwidth_bytes_per_second
        pair = pair or scale_up.bandwidth_bytes_per_second
        domain = f"scale-up, {_domain(scale_up)}"
        add(domain, _bandwidth(link_within(spec, 1)), "scale_up")
        add("scale-up, one pair", scaled(pair, "B/s"), "scale_up")
    if spec.price_per_hour is not None:
        add("price per hour", f"{spec.price_per_hour:g}", "price_per_hour")
    return rows


def _matrix_products(spec: DeviceSpec, architecture: str) -> dict[str, Any]:
    """The fraction of the peak that matrix products reach, by size: equation (K1)."""
    constants = constants_for(OURS, architecture)
    fractions = {}
    for size in MATRIX_SIZES:
        fraction = matmul_fraction(size, size, size, spec, constants)
        fractions[str(size)] = fraction
    return {
        "source": _source(spec, architecture),
        "fractions": fractions,
    }


def _source(spec: DeviceSpec, architecture: str) -> str:
    """Where the curve of matrix products comes from."""
    if not architecture:
        source = spec.sources.get("achievable_fraction", "the device document")
        return f"the best matrix product, for all sizes ({source})"
    calibration = shipped()
    runs = calibration.rows.architecture
    count = runs.get(architecture, 0)
    if count >= MINIMUM_ROWS:
        return f"fitted to {count:,} measured runs on {architecture}"
    known = sorted(name for name, rows in runs.items() if rows >= MINIMUM_ROWS)
    few = f"{count} measured runs" if count else "no measured run"
    return f"{few} on {architecture}: fitted to runs on {', '.join(known)}"


def _domain(scale_up: ScaleUp) -> str:
    """Devices and topology of a scale-up domain: ``72 (switch)``."""
    return f"{scale_up.domain_devices} ({TOPOLOGY[scale_up.topology]})"


def _bandwidth(link: Link | None) -> str:
    return _rate(link.bandwidth_bytes_per_second if link is not None else None, "B/s")


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else scaled(value, unit)
