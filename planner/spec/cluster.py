"""The cluster: groups of equal nodes, their devices, and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

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

INTRA_NODE_LATENCY_SECONDS = 4e-6
"""One hop of a collective inside a node; NCCL over NVLink, order of magnitude."""


class ScaleUp(Document):
    """The fast links that join a device to its neighbours, as its data sheet has them."""

    name: str = ""
    topology: Literal["switch", "mesh", "ring", "pcie"]
    """switch: any pair gets the whole bandwidth; mesh: one link to each neighbour; ring: links to two neighbours;
    pcie: only the host's bus."""
    domain_devices: int = Field(ge=1)
    """Devices that reach each other this way: a node's, a pair under a bridge, or a rack of several nodes."""
    bandwidth_bytes_per_second: float = Field(gt=0)
    """Of one device, over all its links, one direction."""
    pair_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    """Between two devices, one direction; None: the whole bandwidth."""
    latency_seconds: float = Field(default=INTRA_NODE_LATENCY_SECONDS, ge=0)


class DeviceSpec(Document):
    """One accelerator (or CPU rank), by its data sheet or as measured. Dense FLOPs, never sparse ones."""

    id: str = Field(min_length=1)
    name: str = ""
    memory_bytes: int = Field(gt=0, le=MOST_MEMORY_BYTES)
    """All memory; of a GPU, what ``torch.cuda.get_device_properties(0).total_memory`` reports. Contains `reserved_bytes`."""
    peak_flops_per_second: dict[PeakType, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict
    )
    """Peak of matrix products by data type; empty when only measured seconds are used. Jobs in fp32 run at the peak of
    fp32, as torch does by default; tf32 is for those who switch it on."""
    achievable_fraction: float = Field(default=0.8, gt=0, le=1)
    """Best measured large matrix product / peak (MAMF of the catalogue)."""
    memory_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    launch_seconds: float = Field(default=4e-6, ge=0)
    """Fixed cost of one kernel."""
    reserved_bytes: int | None = Field(default=None, ge=0, le=MOST_MEMORY_BYTES)
    """Context, communicators and code of one process; None: the cost model's default."""
    allocation_overhead: float = Field(default=0.0, ge=0)
    """What the allocator takes beyond the activations and temporaries it hands out, as a fraction of them."""
    scale_up: ScaleUp | None = None
    """None: the device has no fast links to its neighbours, or they are not known."""
    host_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    """To the host's memory, one direction; devices of a node beyond the scale-up domain talk this way."""
    network_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    """This device's part of its node's network, one direction."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Of one device, in the user's currency; the catalogue has none."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Where the figures stand, by field."""


class LinkMeasurement(Document):
    """One row of `planner links`."""

    operation: OperationName
    bytes: int = Field(gt=0)
    """Of the full tensor."""
    ranks: int = Field(ge=2)
    nodes: int = Field(default=1, ge=1)
    """Nodes that the group spans, with equally many ranks on each."""
    seconds: float = Field(gt=0)
    relative_spread: float | None = Field(default=None, ge=0)
    """Interquartile range of the samples / their median."""


class LinkFit(Document):
    """Latency and bandwidth of one operation by itself, fitted to its own rows."""

    operation: OperationName
    latency_seconds: float = Field(ge=0)
    """Of one hop."""
    bandwidth_bytes_per_second: float = Field(gt=0)
    relative_residual: float = Field(ge=0)
    """Root mean square of log(predicted / measured): 0.1 is typically 10 % off."""


class Link(Document):
    """How the devices of one level reach each other."""

    latency_seconds: float = Field(ge=0)
    bandwidth_bytes_per_second: float = Field(gt=0)
    """Of one device, one direction."""
    relative_residual: float | None = Field(default=None, ge=0)
    """Of this one fit over all operations; see `LinkFit`."""
    fits: tuple[LinkFit, ...] = ()
    """The same formulas fitted operation by operation: closer, because implementations differ in their algorithms."""
    overlap_slowdown: float | None = Field(default=None, ge=1)
    """Seconds of compute while a collective of this level runs beside it / seconds alone; None: not measured."""
    pipeline_slowdown: float | None = Field(default=None, ge=1)
    """Seconds of a pipeline over all ranks, which share the cores of one machine / seconds with a core for each; None:
    not measured, as every rank has a device of its own."""
    measurements: tuple[LinkMeasurement, ...] = ()
    """The measured table that latency and bandwidth were fitted to, kept for the reader."""


class Links(Document):
    """What `planner links` writes when the ranks stand on several nodes: the two links of a node group."""

    intra_node: Link | None = None
    """None: one rank on every node."""
    inter_node: Link | None = None
    """None: one node."""


class NodeGroup(Document):
    """Equal nodes."""

    name: str = Field(default="nodes", min_length=1)
    device: str | DeviceSpec
    """Catalogue id (`planner devices`) or an inline device. The command line also takes the path of a device document,
    from where the cluster document stands."""
    nodes: int = Field(ge=1, le=1_000_000)
    devices_per_node: int = Field(ge=1, le=10_000)
    intra_node: Link | None = None
    """Also between nodes that these links join (NVL72). None: by the device's scale-up links, else over the host."""
    inter_node: Link | None = None
    """Between the domains, where scale-up links join several nodes and the group is larger. None: by the device's
    network."""
    price_per_hour: float | None = Field(default=None, ge=0)
    """Of one device of this group, in the user's currency; None: the device's."""
    host_memory_bytes: int | None = Field(default=None, gt=0, le=MOST_MEMORY_BYTES)
    """Of one node, for all its devices together: what may be offloaded there. None: not known, nothing is offloaded."""

    def share_of_node(self, devices: int) -> dict[str, int | None]:
        """Fields of some devices of a node: with the part of its host's memory that is theirs."""
        whole = self.host_memory_bytes
        share = (
            None if whole is None else max(1, whole * devices // self.devices_per_node)
        )
        return {"devices_per_node": devices, "host_memory_bytes": share}

    @property
    def device_price_per_hour(self) -> float | None:
        """Of one device: the group's price, else the device's; None: not known."""
        if self.price_per_hour is not None or isinstance(self.device, str):
            return self.price_per_hour
        return self.device.price_per_hour


class Cluster(Document):
    """What the job may use."""

    schema_version: Literal[1] = 1
    name: str = "cluster"
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(group.nodes * group.devices_per_node for group in self.node_groups)

    @property
    def price_per_hour(self) -> float | None:
        """Of all devices, in the user's currency; None: the price of some is not known."""
        prices = [group.device_price_per_hour for group in self.node_groups]
        devices = [group.nodes * group.devices_per_node for group in self.node_groups]
        known = [
            each * price
            for each, price in zip(devices, prices, strict=True)
            if price is not None
        ]
        return sum(known) if len(known) == len(prices) else None

    def part(self, devices: Mapping[int, int]) -> Cluster:
        """Some of its devices as a cluster of their own; links and prices stay, and each device's part of its host.

        Args:
            devices: how many of every node, by its number through all groups; nodes that are not named are left out.
                Node groups come in the order in which their first nodes are named.
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
