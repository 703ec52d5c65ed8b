"""The cluster document: groups of identical nodes, their devices and links."""

from __future__ import annotations

from collections.abc import Mapping
from operator import not_
from typing import Annotated, Literal

from pydantic import Field

from planner.spec.bounds import MOST_CHARACTERS
from planner.spec.device_curves import DeviceCurves
from planner.spec.document import MOST_MEMORY_BYTES, Document

PeakType = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
OperationName = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "point_to_point",
]


def _is_none(value: object) -> bool:
    return value is None


INTRA_NODE_LATENCY_SECONDS = 4e-6
"""Latency of one hop of a collective inside a node: NCCL over NVLink, roughly."""


class ScaleUp(Document):
    """The fast links between a device and its neighbours, by its data sheet."""

    name: str = ""
    """Name of the interconnect."""
    topology: Literal["switch", "mesh", "ring", "pcie"]
    """switch: any pair has the whole bandwidth; mesh: one link to each neighbour; ring:
    links to two neighbours; pcie: only the host's bus."""
    domain_devices: int = Field(ge=1)
    """Devices that these links connect: of a node, of a pair under a bridge, or of a
    rack with several nodes."""
    bandwidth_bytes_per_second: float = Field(gt=0)
    """Bandwidth of one device over all its links, in one direction."""
    pair_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    """Bandwidth between two devices, in one direction; None: the whole bandwidth."""
    latency_seconds: float = Field(default=INTRA_NODE_LATENCY_SECONDS, ge=0)
    """Latency of one hop of a collective."""
    switch_reduction: float | None = Field(
        default=None, gt=0, le=1, exclude_if=_is_none
    )
    """See `Link.switch_reduction`. The catalogue gives none, since frameworks often
    disable it (``NCCL_NVLS_ENABLE=0``)."""


class DeviceSpec(Document):
    """One accelerator (or CPU rank), by its data sheet or as measured; dense FLOPs."""

    id: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    """Identifier, as in the catalogue of devices."""
    name: str = Field(default="", max_length=MOST_CHARACTERS)
    """Name by its vendor."""
    memory_bytes: int = Field(gt=0, le=MOST_MEMORY_BYTES)
    """All memory, including `reserved_bytes`; of a GPU, what
    ``torch.cuda.get_device_properties(0).total_memory`` reports."""
    peak_flops_per_second: dict[PeakType, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict
    )
    """Peak of matrix products by data type; empty if only measured seconds are used.
    Jobs in fp32 use the peak of fp32, as torch does by default, not that of tf32."""
    achievable_fraction: float = Field(default=0.8, gt=0, le=1)
    """Best measured large matrix product / peak (MAMF in the catalogue)."""
    memory_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    """Bandwidth of the device's own memory; None: unknown, and kernels are bound by
    FLOPs alone."""
    launch_seconds: float = Field(default=4e-6, ge=0)
    """Fixed time of one kernel."""
    reserved_bytes: int | None = Field(default=None, ge=0, le=MOST_MEMORY_BYTES)
    """Memory of one process for context, communicators and code; None: the default of
    the cost model."""
    allocation_overhead: float = Field(default=0.0, ge=0)
    """Overhead of the allocator, as a fraction of the activations and temporaries."""
    scale_up: ScaleUp | None = None
    """None: the device has no fast links, or they are unknown."""
    host_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    """Bandwidth to the host's memory, in one direction; also between devices of a node
    that no scale-up link connects."""
    network_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    """This device's share of its node's network, in one direction."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of one device, in the user's currency; the catalogue has none."""
    sources: dict[str, str] = Field(default_factory=dict, max_length=256)
    """Source of every figure, by field."""
    curves: DeviceCurves | None = Field(default=None, exclude_if=_is_none)
    """Measured seconds of kernels by shape, which price counted operations; None: they
    are priced by the peaks and fractions above."""


class LinkMeasurement(Document):
    """One measurement of `planner links`."""

    operation: OperationName
    """The collective that was measured."""
    bytes: int = Field(gt=0)
    """Size of the full tensor."""
    ranks: int = Field(ge=2)
    """Ranks of the group."""
    nodes: int = Field(default=1, ge=1)
    """Nodes of the group, with the same number of ranks on each."""
    seconds: float = Field(gt=0)
    """Median time."""
    relative_spread: float | None = Field(default=None, ge=0)
    """Interquartile range of the samples / their median."""


class LinkFit(Document):
    """Latency and bandwidth of one operation, fitted to its measurements."""

    operation: OperationName
    """The collective that was measured."""
    latency_seconds: float = Field(ge=0)
    """Latency of one hop."""
    bandwidth_bytes_per_second: float = Field(gt=0)
    """Bandwidth of one device, in one direction."""
    relative_residual: float = Field(ge=0)
    """Root mean square of log(predicted / measured): 0.1 is an error of about 10 %."""


class Link(Document):
    """A link: inside a node, or between nodes."""

    latency_seconds: float = Field(ge=0)
    """Latency of one hop of a collective."""
    bandwidth_bytes_per_second: float = Field(gt=0)
    """Bandwidth of one device, in one direction."""
    is_nominal: bool = Field(default=False, exclude_if=not_)
    """Whether the figures are those of a data sheet, of which collectives reach the
    calibrated fraction; else they are used unchanged."""
    switch_reduction: float | None = Field(
        default=None, gt=0, le=1, exclude_if=_is_none
    )
    """Fraction of the bandwidth that all-reduces summed by the switch reach (NVLink
    SHARP); None: no switch sums. NCCL assumes 0.85 for NVIDIA Hopper and 0.74 for
    Blackwell, and uses it unless ``NCCL_NVLS_ENABLE=0`` (NCCL 2.30, src/graph/tuning.cc
    and src/transport/nvls.cc)."""
    relative_residual: float | None = Field(default=None, ge=0)
    """Of one fit over all operations; see `LinkFit`."""
    fits: tuple[LinkFit, ...] = Field(default=(), max_length=256)
    """A fit per operation: more accurate, since algorithms differ by operation."""
    overlap_slowdown: float | None = Field(default=None, ge=1)
    """Seconds of compute concurrent with a collective / seconds alone; None: not
    measured."""
    pipeline_slowdown: float | None = Field(default=None, ge=1)
    """Seconds of a pipeline whose ranks share the cores of one machine / seconds with a
    core per rank; None: not measured, since every rank has a device of its own."""
    measurements: tuple[LinkMeasurement, ...] = Field(default=(), max_length=10_000)
    """The measurements behind latency and bandwidth, for reference."""


class Links(Document):
    """What `planner links` writes for several nodes: both links of a node group."""

    intra_node: Link | None = None
    """None: every node has one rank."""
    inter_node: Link | None = None
    """None: there is one node."""


class NodeGroup(Document):
    """Identical nodes."""

    name: str = Field(default="nodes", min_length=1, max_length=MOST_CHARACTERS)
    """Name of the group in messages."""
    device: str | DeviceSpec
    """Catalogue id (`planner devices`) or an inline device. In a file, also the path of
    a device document, relative to the cluster document."""
    nodes: int = Field(ge=1, le=1_000_000)
    """Number of nodes."""
    devices_per_node: int = Field(ge=1, le=10_000)
    """Devices of one node."""
    intra_node: Link | None = None
    """Also between nodes that scale-up links connect (NVL72). None: the device's
    scale-up links, or the host's bus."""
    inter_node: Link | None = None
    """Between nodes, or between scale-up domains of several nodes. None: the network of
    the device."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Price of one device of this group, in the user's currency; None: the device's."""
    host_memory_bytes: int | None = Field(default=None, gt=0, le=MOST_MEMORY_BYTES)
    """Memory of one node that all its devices may offload to; None: unknown, and
    nothing is offloaded."""

    def share_of_node(self, devices: int) -> dict[str, int | None]:
        """Return the fields for a part of a node, with its share of host memory."""
        whole = self.host_memory_bytes
        share = (
            None if whole is None else max(1, whole * devices // self.devices_per_node)
        )
        return {"devices_per_node": devices, "host_memory_bytes": share}

    @property
    def device_price_per_hour(self) -> float | None:
        """Price of one device: the group's, or else the device's; None: unknown."""
        if self.price_per_hour is not None or isinstance(self.device, str):
            return self.price_per_hour
        return self.device.price_per_hour


class Cluster(Document):
    """The devices that a job may use."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    name: str = Field(default="cluster", max_length=MOST_CHARACTERS)
    """Name in messages and pages; it does not affect the plan."""
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1, max_length=256)
    """Groups of identical nodes; several groups are a heterogeneous cluster."""

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(group.nodes * group.devices_per_node for group in self.node_groups)

    @property
    def price_per_hour(self) -> float | None:
        """Price of all devices, in the user's currency; None: some price is unknown."""
        prices = [group.device_price_per_hour for group in self.node_groups]
        devices = [group.nodes * group.devices_per_node for group in self.node_groups]
        known = [
            each * price
            for each, price in zip(devices, prices, strict=True)
            if price is not None
        ]
        return sum(known) if len(known) == len(prices) else None

    def part(self, devices: Mapping[int, int]) -> Cluster:
        """Return a cluster of some of the devices.

        Links and prices are unchanged; each device has its share of host memory.

        Args:
            devices: number of devices by node, where nodes are numbered through all
                groups; other nodes are left out. Node groups are in the order in which
                their first nodes appear.
        """
        places = {node: place for place, node in enumerate(devices)}
        groups, first = [], 0
        for group in self.node_groups:
            nodes = [
                node for node in range(first, first + group.nodes) if devices.get(node)
            ]
            first += group.nodes
            used = [devices[node] for node in nodes]
            for count in sorted(set(used), reverse=True):
                part = group.model_copy(
                    update={"nodes": used.count(count), **group.share_of_node(count)}
                )
                groups.append((min(places[node] for node in nodes), part))
        ordered = tuple(part for _, part in sorted(groups, key=lambda each: each[0]))
        return self.model_copy(update={"node_groups": ordered})
