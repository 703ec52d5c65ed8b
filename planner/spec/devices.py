"""The device catalogue: data sheets of accelerators, and the links of the nodes they are usually sold in.

Figures are dense FLOPs and decimal bytes from the vendors' data sheets; `achievable_fraction` is the best measured
large bf16 matrix product over the peak (ml-engineering's MAMF table). fp32 peaks are not listed: matrix products of
that type run at a rate that depends on settings (tf32), so a job in fp32 needs a measured profile or an inline device.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from planner.errors import DocumentError, UnknownNameError
from planner.spec.cluster import DeviceSpec, Link, NodeGroup

INTRA_NODE_LATENCY_SECONDS = 4e-6
"""One hop of a collective inside a node; NCCL over NVLink, order of magnitude."""
INTER_NODE_LATENCY_SECONDS = 1.2e-5
"""One hop of a collective between nodes over InfiniBand, order of magnitude."""
DEFAULT_ACHIEVABLE_FRACTION = 0.75
"""For devices without a published measurement."""


@dataclass(frozen=True, slots=True)
class CatalogueDevice:
    """A device and the node it usually stands in."""

    spec: DeviceSpec
    vendor: str
    architecture: str
    devices_per_node: int
    scale_up_link: str
    intra_node: Link
    inter_node: Link | None
    confidence: str


@cache
def catalogue() -> dict[str, CatalogueDevice]:
    """All catalogue devices by id."""
    text = files("planner.spec").joinpath("devices.csv").read_text(encoding="utf-8")
    return {row["id"]: _device(row) for row in csv.DictReader(text.splitlines())}


def find_device(device: str | DeviceSpec, *, field: str = "device") -> DeviceSpec:
    """The data sheet of a catalogue id; an inline device stands for itself.

    Raises:
        UnknownNameError: no catalogue entry has this id.
    """
    if isinstance(device, DeviceSpec):
        return device
    return _find(device, field).spec


def links_of(group: NodeGroup, *, field: str = "node_groups[0]") -> tuple[Link, Link | None]:
    """Links inside and between the nodes of a group: the user's, else the catalogue's. One node needs no second link.

    Raises:
        DocumentError: neither the group nor the catalogue tells a link that the group needs.
    """
    known = catalogue().get(group.device) if isinstance(group.device, str) else None
    intra = group.intra_node or (known.intra_node if known else None)
    inter = group.inter_node or (known.inter_node if known else None)
    if intra is None and group.devices_per_node > 1:
        raise _missing_link(f"{field}.intra_node")
    if inter is None and group.nodes > 1:
        raise _missing_link(f"{field}.inter_node")
    return intra or Link(latency_seconds=0.0, bandwidth_bytes_per_second=1e12), inter


def _missing_link(field: str) -> DocumentError:
    return DocumentError(
        "the catalogue has no such link for this device.",
        field=field,
        mend="give latency_seconds and bandwidth_bytes_per_second, or measure them with `planner links`.",
    )


def _find(identifier: str, field: str) -> CatalogueDevice:
    found = catalogue().get(identifier)
    if found is None:
        raise UnknownNameError(
            f"no device {identifier!r} in the catalogue.",
            field=field,
            mend=f"use one of {', '.join(catalogue())}; or give the device inline, with id and memory_bytes.",
        )
    return found


def _device(row: dict[str, str]) -> CatalogueDevice:
    kinds: tuple[Literal["bf16", "fp16"], ...] = ("bf16", "fp16")
    spec = DeviceSpec(
        id=row["id"],
        name=row["name"],
        memory_bytes=int(row["memory_bytes"]),
        peak_flops_per_second={
            kind: float(row[f"{kind}_flops_per_second"]) for kind in kinds if row[f"{kind}_flops_per_second"]
        },
        achievable_fraction=float(row["achievable_fraction"] or DEFAULT_ACHIEVABLE_FRACTION),
        memory_bandwidth_bytes_per_second=float(row["memory_bandwidth_bytes_per_second"]),
    )
    return CatalogueDevice(
        spec=spec,
        vendor=row["vendor"],
        architecture=row["architecture"],
        devices_per_node=int(row["devices_per_node"]),
        scale_up_link=row["scale_up_link"],
        intra_node=_link(row["intra_node_bytes_per_second"], INTRA_NODE_LATENCY_SECONDS),
        inter_node=_link(row["inter_node_bytes_per_second"], INTER_NODE_LATENCY_SECONDS)
        if row["inter_node_bytes_per_second"]
        else None,
        confidence=row["confidence"],
    )


def _link(bandwidth: str, latency_seconds: float) -> Link:
    return Link(latency_seconds=latency_seconds, bandwidth_bytes_per_second=float(bandwidth))
