"""The cluster: groups of equal nodes, their devices, and the links between them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planner.spec.document import Document


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

    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point"]
    bytes: int = Field(gt=0)
    """Of the full tensor."""
    ranks: int = Field(ge=2)
    seconds: float = Field(gt=0)


class Link(Document):
    """How the devices of one level reach each other."""

    latency_seconds: float = Field(ge=0)
    bandwidth_bytes_per_second: float = Field(gt=0)
    """Of one device, one direction."""
    measurements: tuple[LinkMeasurement, ...] = ()
    """The measured table that latency and bandwidth were fitted to, kept for the reader."""


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
