"""What prices depend on besides the stage map: documents, device, links, and where the ranks stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.errors import UnsupportedError
from planner.spec.calibration import Constants, constants_for
from planner.spec.cluster import Cluster, DeviceSpec, Link, NodeGroup
from planner.spec.devices import catalogue, find_device, links_of
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.plan import Plan, RankPlacement
from planner.spec.profile import LayerProfile, Measurement, ModelProfile, RecomputeMode

_GROUP_FIELD = "request.cluster.node_groups[0]"


@dataclass(frozen=True, slots=True)
class Spread:
    """How the members of one communicator lie on the nodes."""

    ranks: int
    nodes: int
    fullest: int
    """Members on the node that has most."""


@dataclass(frozen=True)
class Facts:
    """One layout of one request, placed on the cluster."""

    profile: ModelProfile
    job: Job
    layout: Layout
    micro_batches: int
    placement: Sequence[RankPlacement]
    nodes: NodeGroup
    device: DeviceSpec
    intra_node: Link
    """As collectives reach it: equation (K3)."""
    inter_node: Link
    constants: Constants

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        return self.nodes.nodes * self.nodes.devices_per_node

    def rows(self, layer: LayerProfile) -> dict[RecomputeMode, Measurement]:
        """The layer's measurements at this micro-batch size, sequence length and tensor-parallel degree."""
        wanted = (self.layout.micro_batch_size, self.job.sequence_length, self.layout.tensor_parallel_degree)
        return {
            row.recompute: row
            for row in layer.measurements
            if (row.micro_batch_size, row.sequence_length, row.tensor_parallel_degree) == wanted
        }

    @cached_property
    def tensor_spread(self) -> Spread:
        """Of the tensor-parallel group that crosses most nodes."""
        return _widest((row.pipeline, row.data, row.node) for row in self.placement)

    @cached_property
    def data_spread(self) -> Spread:
        """Of the data-parallel group that crosses most nodes."""
        return _widest((row.pipeline, row.tensor, row.node) for row in self.placement)

    @cached_property
    def is_one_node(self) -> bool:
        """Do all ranks stand on the same node?"""
        return len({row.node for row in self.placement}) == 1

    @cached_property
    def boundary_links(self) -> tuple[Link, ...]:
        """Per stage boundary: the link that its slowest transfer takes, from a rank to its peer of the next stage."""
        node = {(row.pipeline, row.data, row.tensor): row.node for row in self.placement}
        crossed = {stage for (stage, *peer), at in node.items() if node.get((stage + 1, peer[0], peer[1]), at) != at}
        boundaries = range(self.layout.pipeline_parallel_degree - 1)
        return tuple(self.inter_node if stage in crossed else self.intra_node for stage in boundaries)


def _widest(members: Iterable[tuple[int, int, int]]) -> Spread:
    """Of all groups, given as (two coordinates that name the group, node): most nodes, then least on the fullest."""
    groups: dict[tuple[int, int], Counter[int]] = {}
    for first, second, node in members:
        groups.setdefault((first, second), Counter())[node] += 1
    spreads = [Spread(nodes.total(), len(nodes), max(nodes.values())) for nodes in groups.values()]
    return max(spreads, key=lambda spread: (spread.nodes, -spread.fullest))


def facts_of(plan: Plan, profile: ModelProfile) -> Facts:
    """What the plan's request says, for the layout and placement that it chose."""
    return gather(profile, plan.request.cluster, plan.request.job, plan.layout, plan.placement, plan.micro_batches)


def gather(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    layout: Layout,
    placement: Sequence[RankPlacement],
    micro_batches: int,
) -> Facts:
    """Look up device and links.

    Raises:
        UnsupportedError: several node groups.
        UnknownNameError, DocumentError: a device or link that neither the cluster nor the catalogue tells.
    """
    if len(cluster.node_groups) > 1:
        raise UnsupportedError(
            f"{len(cluster.node_groups)} node groups: plans for heterogeneous clusters cannot be checked yet.",
            field="request.cluster.node_groups",
            mend="give a plan for one group of equal nodes.",
        )
    group = cluster.node_groups[0]
    intra_node, inter_node = links_of(group, field=_GROUP_FIELD)
    device = find_device(group.device, field=f"{_GROUP_FIELD}.device")
    known = catalogue().get(device.id)
    constants = constants_for("planner", known.architecture if known else "")
    return Facts(
        profile=profile,
        job=job,
        layout=layout,
        micro_batches=micro_batches,
        placement=placement,
        nodes=group,
        device=device,
        intra_node=_slowed(intra_node, constants.intra_node_fraction),
        inter_node=_slowed(inter_node or intra_node, constants.inter_node_fraction if inter_node else 1.0),
        constants=constants,
    )


def _slowed(link: Link, fraction: float) -> Link:
    bandwidth = link.bandwidth_bytes_per_second * fraction
    return link.model_copy(update={"bandwidth_bytes_per_second": bandwidth}) if fraction != 1 else link
