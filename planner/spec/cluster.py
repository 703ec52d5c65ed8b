"""The cluster: groups of equal nodes, their devices, and the links between them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.spec.document import Document

OperationName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point"]

class DeviceSpec(Document):
    """One accelerator (or CPU rank), by its data sheet or as measured. Dense FLOPs, never sparse ones."""

    id: str = Field(min_length=1)
    name: str = ""
    memory_bytes: int = Field(gt=0)
    peak_flops_per_second: dict[Literal["fp32", "bf16", "fp16"], float] = Field(default_factory=dict)
    """Peak of matrix products by data type; empty when only measured seconds are used."""
    achievable_fraction: float = Field(default=0.8, gt=0, le=1)
    """Best measured large matrix product / peak (MAMF of the catalogue)."""
    memory_bandwidth_bytes_per_second: float | None = Field(default=None, gt=0)
    launch_seconds: float = Field(default=4e-6, ge=0)
    """Fixed cost of one kernel."""
    reserved_bytes: int | None = Field(default=None, ge=0)
    """Context, communicators and code of one process; None: the cost model's default."""
    allocation_overhead: float = Field(default=0.0, ge=0)
    """What the allocator takes beyond the activations and temporaries it hands out, as a fraction of them."""


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
    """Catalogue id (`planner devices`) or an inline device."""
    nodes: int = Field(ge=1)
    devices_per_node: int = Field(ge=1)
    intra_node: Link | None = None
    """None: the catalogue's."""
    inter_node: Link | None = None
    """None: the catalogue's."""


class Cluster(Document):
    """What the job may use."""

    schema_version: Literal[1] = 1
    name: str = "cluster"
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(group.nodes * group.devices_per_node for group in self.node_groups)
