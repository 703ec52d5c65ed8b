"""The device catalogue: data sheets of accelerators, and links of their usual nodes.

Figures are dense FLOPs and decimal bytes from the vendors' data sheets, each with its
source. `achievable_fraction` is the best measured large bf16 matrix product / peak
(MAMF table of ml-engineering). fp32 is the rate of matrix products without tf32: of the
CUDA cores on NVIDIA devices, of the matrix cores on AMD devices.

`memory_bytes` is what `torch.cuda.get_device_properties(0).total_memory` reports in a
public log; if drivers differ, the smallest value commonly seen. It includes the CUDA
context, communicators and the allocator's overhead, which are `reserved_bytes` of the
cost model.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, get_args

from planner.errors import DocumentError, UnknownNameError
from planner.spec.cluster import (
    INTRA_NODE_LATENCY_SECONDS,
    DeviceSpec,
    Link,
    NodeGroup,
    PeakType,
    ScaleUp,
)

INTER_NODE_LATENCY_SECONDS = 1.2e-5
"""Latency of one hop of a collective between nodes over InfiniBand, roughly."""
DEFAULT_ACHIEVABLE_FRACTION = 0.75
"""For devices without a published measurement."""
HOST_ACHIEVABLE_FRACTION = 0.8
"""Fraction of the host link's data sheet that copies of pinned memory reach: 25 of 31.5
GB/s over PCIe 4 x 16."""
ASSUMED = "assumed: no published measurement"

SOURCES = {
    "peak_flops_per_second": "peak_source",
    "memory_bytes": "memory_source",
    "memory_bandwidth_bytes_per_second": "memory_bandwidth_source",
    "achievable_fraction": "achievable_source",
    "scale_up": "scale_up_source",
    "host_bandwidth_bytes_per_second": "host_source",
    "network_bandwidth_bytes_per_second": "network_source",
}
"""Column with the source of each field of the data sheet."""


@dataclass(frozen=True, slots=True)
class CatalogueDevice:
    """A device and its usual node."""

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
    """Return all devices of the catalogue by id."""
    text = files("planner.spec").joinpath("devices.csv").read_text(encoding="utf-8")
    return {row["id"]: _device(row) for row in csv.DictReader(text.splitlines())}


def find_device(device: str | DeviceSpec, *, field: str = "device") -> DeviceSpec:
    """Return the data sheet of a catalogue id; an inline device is returned unchanged.

    Raises:
        UnknownNameError: no catalogue entry has this id; the hint has the nearest.
    """
    if isinstance(device, DeviceSpec):
        return device
    return find_entry(device, field=field).spec


def find_entry(identifier: str, *, field: str = "device") -> CatalogueDevice:
    """Return the catalogue entry of an id.

    Raises:
        UnknownNameError: there is none; the hint has the nearest ids.
    """
    found = catalogue().get(identifier)
    if found is None:
        near = nearest_devices(identifier)
        hint = f"did you mean {', '.join(near)}? See `planner devices`."
        if not near:
            known = ", ".join(catalogue())
            hint = f"use one of {known}, or an inline device with id and memory_bytes."
        raise UnknownNameError(
            f"no device {identifier!r} in the catalogue.", field=field, hint=hint
        )
    return found


def nearest_devices(identifier: str, most: int = 5) -> tuple[str, ...]:
    """Return ids with all words of the identifier, then ids of similar spelling."""
    words = [word for word in re.split(r"[^a-z0-9]+", identifier.lower()) if word]
    matching = [
        key
        for key, each in catalogue().items()
        if _has_words(f"{key} {each.spec.name.lower()}", words)
    ]
    similar = difflib.get_close_matches(
        identifier.lower(), catalogue(), n=most, cutoff=0.45
    )
    return tuple(dict.fromkeys([*matching, *similar]))[:most]


def _has_words(text: str, words: list[str]) -> bool:
    return bool(words) and all(word in text for word in words)


def links_of(
    group: NodeGroup, *, field: str = "node_groups[0]", is_alone: bool = True
) -> tuple[Link, Link | None]:
    """Return the links inside and between the domains of a group.

    They are those of the group, or else of its device. A domain is a node, or several
    nodes with common scale-up links: see `domain_of`.

    Args:
        group: the node group.
        field: its path, for errors.
        is_alone: the cluster has no other group; one domain then needs no second link.

    Raises:
        DocumentError: neither the group nor the device has a link that the group needs.
    """
    device = _known(group.device)
    intra = group.intra_node or (
        link_within(device, group.devices_per_node) if device else None
    )
    inter = group.inter_node or (
        _link_between_domains(device, group, is_alone=is_alone) if device else None
    )
    if intra is None and group.devices_per_node > 1:
        raise _missing_link(f"{field}.intra_node")
    if inter is None and not (
        is_alone and group.nodes * group.devices_per_node <= domain_of(group)
    ):
        raise _missing_link(f"{field}.inter_node")
    return intra or Link(latency_seconds=0.0, bandwidth_bytes_per_second=1e12), inter


def _known(device: str | DeviceSpec) -> DeviceSpec | None:
    if isinstance(device, DeviceSpec):
        return device
    found = catalogue().get(device)
    return found.spec if found else None


def link_within(device: DeviceSpec, devices: int) -> Link | None:
    """Return the link inside a node: scale-up if it joins all devices, or host."""
    if device.scale_up is not None and devices <= device.scale_up.domain_devices:
        return Link(
            latency_seconds=device.scale_up.latency_seconds,
            bandwidth_bytes_per_second=device.scale_up.bandwidth_bytes_per_second,
            switch_reduction=device.scale_up.switch_reduction,
        )
    return _link(device.host_bandwidth_bytes_per_second, INTRA_NODE_LATENCY_SECONDS)


def domain_of(group: NodeGroup) -> int:
    """Return the number of devices that `intra_node` connects.

    They are the devices of a node, or of all nodes of a scale-up domain: 18 nodes of 4
    in an NVIDIA GB200 NVL72. A group on several domains whose nodes can be divided into
    segments of a power of two has one such segment in each domain: 16 nodes (64 of 72
    devices), as NVIDIA recommends for jobs of 128 GPUs or more (``--segment=16`` of
    Slurm's topology/block plugin; NVIDIA technical blog, "Unlock Exascale Performance
    on NVIDIA GB200 NVL72 with Slurm Topology-Aware Job Scheduling", 2026).

    A node with fewer devices than usual (4 of 8) is a domain. So is every node if the
    group has an inter_node link and one domain could contain all its nodes.
    """
    device, one = _known(group.device), group.devices_per_node
    if device is None or device.scale_up is None:
        return one
    wide, usual = device.scale_up.domain_devices, catalogue().get(device.id)
    nodes = min(wide // one, wide // usual.devices_per_node if usual else wide)
    if group.inter_node is not None and group.nodes <= nodes:
        return one
    return one * _nodes_of_segment(group.nodes, max(1, nodes))


def _nodes_of_segment(nodes: int, domain_nodes: int) -> int:
    """Return the number of a job's nodes in each scale-up domain."""
    segment = 1 << (domain_nodes.bit_length() - 1)
    if nodes > domain_nodes and nodes % segment == 0:
        return segment
    return domain_nodes


def _link_between_domains(
    device: DeviceSpec, group: NodeGroup, *, is_alone: bool
) -> Link | None:
    """The network; None if one domain contains the whole cluster."""
    if is_alone and group.nodes * group.devices_per_node <= domain_of(group):
        return None
    return _link(device.network_bandwidth_bytes_per_second, INTER_NODE_LATENCY_SECONDS)


def _link(bandwidth: float | None, latency_seconds: float) -> Link | None:
    return (
        Link(latency_seconds=latency_seconds, bandwidth_bytes_per_second=bandwidth)
        if bandwidth
        else None
    )


def _missing_link(field: str) -> DocumentError:
    return DocumentError(
        "the device's data sheet has no such link.",
        field=field,
        hint="give latency_seconds and bandwidth_bytes_per_second, "
        "or measure them with `planner links`.",
    )


def device_price_per_hour(group: NodeGroup) -> float | None:
    """Return the price of one device, of the group or the device; None: unknown."""
    if group.price_per_hour is not None:
        return group.price_per_hour
    device = _known(group.device)
    return device.price_per_hour if device else None


def _device(row: dict[str, str]) -> CatalogueDevice:
    spec = _spec(row)
    devices_per_node = int(row["devices_per_node"])
    intra_node = link_within(spec, devices_per_node)
    if intra_node is None:
        raise ValueError(f"{spec.id} has no link inside its node")
    return CatalogueDevice(
        spec=spec,
        vendor=row["vendor"],
        architecture=row["architecture"],
        devices_per_node=devices_per_node,
        scale_up_link=row["scale_up_name"] or "none",
        intra_node=intra_node,
        inter_node=_link(
            spec.network_bandwidth_bytes_per_second, INTER_NODE_LATENCY_SECONDS
        ),
        confidence=row["confidence"],
    )


def _spec(row: dict[str, str]) -> DeviceSpec:
    peaks = {
        kind: _number(row[f"{kind}_flops_per_second"]) for kind in get_args(PeakType)
    }
    return DeviceSpec(
        id=row["id"],
        name=row["name"],
        memory_bytes=int(row["memory_bytes"]),
        peak_flops_per_second={kind: peak for kind, peak in peaks.items() if peak},
        achievable_fraction=_number(row["achievable_fraction"])
        or DEFAULT_ACHIEVABLE_FRACTION,
        memory_bandwidth_bytes_per_second=_number(
            row["memory_bandwidth_bytes_per_second"]
        ),
        scale_up=_scale_up(row),
        host_bandwidth_bytes_per_second=_number(row["host_bytes_per_second"]),
        network_bandwidth_bytes_per_second=_number(row["network_bytes_per_second"]),
        sources=_sources(row),
    )


def _scale_up(row: dict[str, str]) -> ScaleUp | None:
    if not row["scale_up_topology"]:
        return None
    fields: dict[str, Any] = {
        "name": row["scale_up_name"],
        "topology": row["scale_up_topology"],
        "domain_devices": int(row["scale_up_domain_devices"]),
        "bandwidth_bytes_per_second": _number(row["scale_up_bytes_per_second"]),
        "pair_bandwidth_bytes_per_second": _number(
            row["scale_up_pair_bytes_per_second"]
        ),
    }
    return ScaleUp.model_validate(fields)


def _sources(row: dict[str, str]) -> dict[str, str]:
    sources = {field: row[column] for field, column in SOURCES.items() if row[column]}
    return {"achievable_fraction": ASSUMED, **sources}


def _number(text: str) -> float | None:
    return float(text) if text else None
