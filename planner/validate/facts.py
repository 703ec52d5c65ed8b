"""What prices depend on besides the stage map: documents, device, links, and where the ranks stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.errors import UnsupportedError
from planner.spec.calibration import Constants, constants_for
from planner.spec.cluster import Cluster, DeviceSpec, Link, NodeGroup
from planner.spec.devices import catalogue, domain_of, find_device, links_of
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.plan import Plan, RankPlacement
from planner.spec.profile import LayerProfile, Measurement, ModelProfile, RecomputeMode

_GROUP_FIELD = "request.cluster.node_groups[0]"
Coordinate = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """How the members of one communicator lie on the nodes; nodes that scale-up links join count as one."""

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
        """That the plan has to use: all of the cluster, or, where the job's objective lets it use fewer, its own."""
        if self.job.objective != "step_time":
            return self.layout.devices
        return self.nodes.nodes * self.nodes.devices_per_node

    def rows(self, layer: LayerProfile) -> dict[RecomputeMode, Measurement]:
        """The layer's measurements under this layout, at the job's sequence length."""
        key = id(layer.measurements)
        if key not in self._rows:
            layout = self.layout
            wanted = (
                layout.micro_batch_size,
                self.job.sequence_length,
                layout.tensor_parallel_degree,
                layout.context_parallel_degree,
                layout.expert_parallel_degree,
                layout.sequence_parallel,
            )
            self._rows[key] = {row.recompute: row for row in layer.measurements if _split(row) == wanted}
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[int, dict[RecomputeMode, Measurement]]:
        """What `rows` has found: identical layers share their measurements."""
        return {}

    @cached_property
    def spreads(self) -> Mapping[str, Spread]:
        """By name of a group, the one that crosses most nodes.

        tensor, context and expert ranks exchange activations; data ranks (context ranks among them, whose gradients
        are of other tokens) sum gradients; expert_data are those of them that hold the same experts. ZeRO's states are
        shared out by shard, runs of neighbours among the data ranks, and their experts by expert_shard; copies hold the
        same shard.
        """
        return {
            name: _widest((coordinate(row), self._domain(row)) for row in self.placement)
            for name, coordinate in self._axes
        }

    @property
    def _axes(self) -> tuple[tuple[str, Callable[[RankPlacement], Coordinate]], ...]:
        """By name of a group: what its members have in common."""
        context, expert = self.layout.context_parallel_degree, self.layout.expert_parallel_degree
        shards = self.layout.zero_shard_degree or self.layout.data_parallel_degree * context
        return (
            ("tensor", lambda row: (row.pipeline, row.data, row.context)),
            ("context", lambda row: (row.pipeline, row.data, row.tensor)),
            ("expert", lambda row: (row.pipeline, row.tensor, (row.data * context + row.context) // expert)),
            ("data", lambda row: (row.pipeline, row.tensor)),
            ("expert_data", lambda row: (row.pipeline, row.tensor, row.expert)),
            ("shard", lambda row: (row.pipeline, row.tensor, (row.data * context + row.context) // shards)),
            (
                "expert_shard",
                lambda row: (row.pipeline, row.tensor, (row.data * context + row.context) // shards, row.expert),
            ),
            ("copies", lambda row: (row.pipeline, row.tensor, (row.data * context + row.context) % shards)),
        )

    @cached_property
    def is_one_node(self) -> bool:
        """Do all ranks stand on the same node, or on nodes that scale-up links join?"""
        return len({self._domain(row) for row in self.placement}) == 1

    def _domain(self, row: RankPlacement) -> int:
        """Number of the domain that the rank stands in: its node's, unless scale-up links join several nodes."""
        return row.node // self._domain_nodes

    @cached_property
    def _domain_nodes(self) -> int:
        return domain_of(self.nodes) // self.nodes.devices_per_node

    @cached_property
    def boundary_links(self) -> tuple[Link, ...]:
        """Per stage boundary: the link that its slowest transfer takes, from a rank to its peer of the next stage.

        With several stages per rank every boundary is held to the slowest link between neighbouring pipeline ranks.
        """
        ranks, each = self.layout.pipeline_parallel_degree, self.layout.virtual_stages_per_rank
        node = {(row.pipeline, (row.data, row.tensor, row.context)): self._domain(row) for row in self.placement}
        crossed = {rank for (rank, peer), at in node.items() if node.get((rank + 1, peer), at) != at}
        boundaries = range(ranks * each - 1)
        return tuple(
            self.inter_node if (crossed if each > 1 else boundary in crossed) else self.intra_node
            for boundary in boundaries
        )


def _split(row: Measurement) -> tuple[int, int, int, int, int, bool]:
    """Micro-batch size, sequence length, and how the layer was split when it was measured."""
    degrees = (row.tensor_parallel_degree, row.context_parallel_degree, row.expert_parallel_degree)
    return (row.micro_batch_size, row.sequence_length, *degrees, row.sequence_parallel)


def _widest(members: Iterable[tuple[Coordinate, int]]) -> Spread:
    """Of all groups, given as (what its members have in common, node): most nodes, then least on the fullest."""
    groups: dict[Coordinate, Counter[int]] = {}
    for common, node in members:
        groups.setdefault(common, Counter())[node] += 1
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
