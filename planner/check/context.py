"""What a plan's time and memory depend on besides its stage map and actions.

Ranks fill the nodes in order, node group after node group; nodes are numbered through
all groups of the cluster. Of every group the check uses the device, its links and the
fitted constants of the runtime on the device's architecture.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from planner import runtimes
from planner.spec.calibration import CalibrationTable, Constants, constants_for
from planner.spec.cluster import Cluster, DeviceSpec, Link, NodeGroup
from planner.spec.devices import catalogue, domain_of, find_device, links_of
from planner.spec.job import OURS, Job
from planner.spec.layout import Layout
from planner.spec.plan import Plan, RankPlacement
from planner.spec.profile import (
    LayerPolynomials,
    LayerProfile,
    Measurement,
    ModelProfile,
    RecomputeMode,
    SplitDegrees,
)


class LinkPair(NamedTuple):
    """Links inside a domain and between domains, as collectives reach them: (K3)."""

    intra_node: Link
    inter_node: Link


@dataclass(frozen=True)
class UsedGroup:
    """A node group of the cluster, with the nodes and devices that the plan uses."""

    whole: NodeGroup
    used: NodeGroup
    first_node: int
    device: DeviceSpec
    links: LinkPair
    constants: Constants

    @property
    def devices(self) -> int:
        """Number of devices that the plan uses."""
        return self.used.nodes * self.used.devices_per_node

    @cached_property
    def domain_nodes(self) -> int:
        """Nodes that common scale-up links connect."""
        return domain_of(self.used) // self.used.devices_per_node

    def domain(self, node: int) -> int:
        """Return the index of a node's domain in the group."""
        return (node - self.first_node) // self.domain_nodes


@dataclass(frozen=True)
class Context:
    """One layout of one request, placed on the cluster."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    layout: Layout
    placement: Sequence[RankPlacement]
    micro_batches: int
    """Of the data-parallel rank that has the most."""
    constants: Constants | None = None
    """Of every node group; None: those of the runtime on its architecture."""
    calibration: CalibrationTable | None = None
    """None: the one of this release."""

    @classmethod
    def of(cls, plan: Plan, profile: ModelProfile) -> Context:
        """Return the context of a plan."""
        request = plan.request
        return cls(
            profile,
            request.cluster,
            request.job,
            plan.layout,
            plan.placement,
            plan.micro_batches,
            calibration=request.calibration,
        )

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of every data-parallel rank."""
        even = (self.micro_batches,) * self.layout.data_parallel_degree
        return self.layout.micro_batch_shares or even

    @property
    def tokens(self) -> int:
        """Tokens of a step; samples of models without a sequence."""
        return self.job.global_batch_size * (self.job.sequence_length or 1)

    @property
    def peak_flops_per_second(self) -> float | None:
        """Sum of the peaks of all devices that the plan uses; None: one is unknown."""
        peak = 0.0
        for group in self.groups.values():
            peaks = group.device.peak_flops_per_second
            if self.profile.dtype not in peaks:
                return None
            peak += group.devices * peaks[self.profile.dtype]
        return peak

    @cached_property
    def has_rows(self) -> bool:
        """Whether the profile gives every layer at the layout's sizes."""
        return all(self.rows(layer) for layer in self.profile.layers)

    @property
    def is_derived(self) -> bool:
        """Whether the plan's operations follow from the sizes of a decoder.

        They do for other runtimes, and for sizes that the profile does not list.
        """
        is_listed = self.job.runtime == OURS and self.has_rows
        return self.profile.transformer is not None and not is_listed

    @property
    def is_priced(self) -> bool:
        """Whether the check can recompute seconds and bytes.

        It does so for the planner's own executor, if its operations are in the profile.
        """
        return self.job.runtime == OURS and not self.is_derived

    @cached_property
    def group_of_node(self) -> Mapping[int, int]:
        """Index in the cluster of every node's group."""
        homes = []
        for index, group in enumerate(self.cluster.node_groups):
            homes += [index] * group.nodes
        return dict(enumerate(homes))

    @cached_property
    def groups(self) -> Mapping[int, UsedGroup]:
        """Used node groups by index, in the order in which ranks use them.

        If no rank is on a node of the cluster, these are all groups.

        Raises:
            UnknownNameError, DocumentError: a device or link is unknown.
        """
        ranks = Counter(row.node for row in self.placement)
        nodes: dict[int, list[int]] = {}
        for node, count in ranks.items():
            if node in self.group_of_node:
                nodes.setdefault(self.group_of_node[node], []).append(count)
        if not nodes:
            nodes = {index: [] for index in range(len(self.cluster.node_groups))}
        is_alone = len(nodes) == 1
        return {
            index: self._used_group(index, counts, is_alone)
            for index, counts in nodes.items()
        }

    def _used_group(self, index: int, ranks: list[int], is_alone: bool) -> UsedGroup:
        """Return a node group with as many of its nodes as there are rank counts."""
        whole = self.cluster.node_groups[index]
        field = f"request.cluster.node_groups[{index}]"
        per_node = max(ranks, default=whole.devices_per_node)
        size = {
            "nodes": len(ranks) or whole.nodes,
            "devices_per_node": min(per_node, whole.devices_per_node),
        }
        used = whole.model_copy(update=size)
        device = find_device(whole.device, field=f"{field}.device")
        constants = self.constants or _fitted(whole, device, self.job, self.calibration)
        intra, inter = links_of(used, field=field, is_alone=is_alone)
        reached = slowed(intra, constants.intra_node_fraction)
        network = slowed(inter, constants.inter_node_fraction) if inter else reached
        first = sum(one.nodes for one in self.cluster.node_groups[:index])
        return UsedGroup(
            whole, used, first, device, LinkPair(reached, network), constants
        )

    @property
    def devices(self) -> int:
        """Devices that the plan has to use: all of its node groups.

        The objectives cost and devices may use fewer.
        """
        if self.job.objective != "step_time":
            return self.layout.devices
        wholes = [group.whole for group in self.groups.values()]
        return sum(whole.nodes * whole.devices_per_node for whole in wholes)

    @property
    def possible_devices(self) -> set[int]:
        """Numbers of devices that other plans of the request may use."""
        if self.job.objective != "step_time":
            return {self.layout.devices}
        sums = {0}
        for group in self.cluster.node_groups:
            devices = group.nodes * group.devices_per_node
            sums |= {smaller + devices for smaller in sums}
        return sums - {0}

    def capacity_bytes(self, device: DeviceSpec) -> int:
        """Return the device memory that the job may use."""
        headroom, memory = self.job.memory_headroom or 0.0, device.memory_bytes
        return int(memory - (headroom * memory if headroom < 1 else headroom))

    @property
    def largest_capacity_bytes(self) -> int:
        """Usable memory of the cluster's largest device."""
        groups = self.cluster.node_groups
        return max(self.capacity_bytes(find_device(one.device)) for one in groups)

    @property
    def split(self) -> SplitDegrees:
        """Degrees that split the layers."""
        return SplitDegrees(
            self.layout.tensor_parallel_degree,
            self.layout.context_parallel_degree,
            self.layout.expert_parallel_degree,
            self.layout.sequence_parallel,
        )

    def rows(self, layer: LayerProfile) -> dict[RecomputeMode, Measurement]:
        """Return the layer's rows for this layout and sequence length, by mode.

        If the profile lists none, they are the counts that its polynomials give.
        """
        size = (self.layout.micro_batch_size, self.job.sequence_length)
        listed = {
            row.recompute: row
            for row in layer.measurements
            if (row.micro_batch_size, row.sequence_length) == size
            and row.split == self.split
        }
        polynomials = self.polynomials(layer)
        if listed or polynomials is None:
            return listed
        return {
            mode: polynomials.row(*size, mode) for mode in polynomials.modes_at(size[0])
        }

    def polynomials(self, layer: LayerProfile) -> LayerPolynomials | None:
        """Return the layer's polynomials for this layout, if it has some."""
        return layer.polynomials_at(
            self.layout.micro_batch_size, self.job.sequence_length, self.split
        )


def _fitted(
    group: NodeGroup,
    device: DeviceSpec,
    job: Job,
    calibration: CalibrationTable | None,
) -> Constants:
    """Return the fitted constants of the planner's executor on a device."""
    known = catalogue().get(device.id)
    intra, inter = group.intra_node, group.inter_node
    data_format: str = job.precision
    if data_format == "fp8":
        data_format += f"-{runtimes.planned(OURS).fp8_scaling}"
    return constants_for(
        OURS,
        known.architecture if known else "",
        calibration=calibration,
        has_intra_node=intra is not None and not intra.is_nominal,
        has_inter_node=inter is not None and not inter.is_nominal,
        data_format=data_format,
    )


def slowed(link: Link, fraction: float) -> Link:
    """Return a link with a fraction of its bandwidth."""
    bandwidth = link.bandwidth_bytes_per_second * fraction
    return link.model_copy(update={"bandwidth_bytes_per_second": bandwidth})


def slowest(links: Iterable[Link]) -> Link:
    """Return a link with the largest latency and the smallest bandwidth of several."""
    every = list(links)
    if len(set(every)) == 1:
        return every[0]
    return Link(
        latency_seconds=max(link.latency_seconds for link in every),
        bandwidth_bytes_per_second=min(
            link.bandwidth_bytes_per_second for link in every
        ),
    )
