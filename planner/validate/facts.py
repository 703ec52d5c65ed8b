"""What prices depend on besides the stage map: documents, layout, placement, and the node groups that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.spec.calibration import Constants
from planner.spec.cluster import Cluster
from planner.spec.fp8 import DYNAMIC, Fp8Casts
from planner.spec.job import OURS, Job
from planner.spec.layout import Layout
from planner.spec.plan import Plan, RankPlacement
from planner.spec.profile import LayerProfile, Measurement, ModelProfile, RecomputeMode
from planner.validate.node_groups import UsedGroup, used_groups


@dataclass(frozen=True)
class Facts:
    """One layout of one request, placed on the cluster."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    layout: Layout
    micro_batches: int
    """Of the data-parallel rank that has most."""
    placement: Sequence[RankPlacement]
    groups: tuple[UsedGroup, ...]
    """In the order in which the ranks use them."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of every data-parallel rank."""
        layout = self.layout
        return (
            layout.micro_batch_shares
            or (self.micro_batches,) * layout.data_parallel_degree
        )

    @property
    def runtime(self) -> str:
        """Return the framework whose kernels and overlaps the plan is priced for."""
        return self.job.runtime

    @property
    def is_priced_here(self) -> bool:
        """Return whether seconds and bytes are those of our own executor, which are recomputed."""
        return self.runtime == OURS

    @property
    def casts(self) -> Fp8Casts | None:
        """What our own executor casts to fp8; None: the job's precision is another."""
        return DYNAMIC if self.job.precision == "fp8" else None

    @property
    def devices(self) -> int:
        """That the plan has to use: all of its node groups, or, where the job's objective lets it use fewer, its
        own."""
        if self.job.objective != "step_time":
            return self.layout.devices
        return sum(
            group.whole.nodes * group.whole.devices_per_node for group in self.groups
        )

    @cached_property
    def possible_devices(self) -> frozenset[int]:
        """How many other plans of the request may use: all of a homogeneous cluster, some groups of another."""
        if self.job.objective != "step_time":
            return frozenset({self.layout.devices})
        sums = {0}
        for group in self.cluster.node_groups:
            sums |= {some + group.nodes * group.devices_per_node for some in sums}
        return frozenset(sums - {0})

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
            self._rows[key] = {
                row.recompute: row
                for row in layer.measurements
                if _split(row) == wanted
            }
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[int, dict[RecomputeMode, Measurement]]:
        """What `rows` has found: identical layers share their measurements."""
        return {}

    def group_of(self, node: int) -> int:
        """Place of a node's group among those that are used."""
        return next(place for place, group in enumerate(self.groups) if group.has(node))


def _split(row: Measurement) -> tuple[int, int, int, int, int, bool]:
    """Micro-batch size, sequence length, and how the layer was split when it was measured."""
    degrees = (
        row.tensor_parallel_degree,
        row.context_parallel_degree,
        row.expert_parallel_degree,
    )
    return (row.micro_batch_size, row.sequence_length, *degrees, row.sequence_parallel)


def facts_of(plan: Plan, profile: ModelProfile) -> Facts:
    """What the plan's request says, for the layout and placement that it chose."""
    return gather(
        profile,
        plan.request.cluster,
        plan.request.job,
        plan.layout,
        plan.placement,
        plan.micro_batches,
    )


def gather(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    layout: Layout,
    placement: Sequence[RankPlacement],
    micro_batches: int,
    constants: Constants | None = None,
) -> Facts:
    """Look up devices and links.

    Raises:
        UnknownNameError, DocumentError: a device or link that neither the cluster nor the catalogue tells.
    """
    return Facts(
        profile=profile,
        cluster=cluster,
        job=job,
        layout=layout,
        micro_batches=micro_batches,
        placement=placement,
        groups=used_groups(cluster, placement, constants),
    )
