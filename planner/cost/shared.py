"""What belongs to several layers at once: parameters that they share, and tensors that skip from one to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.cost.communication import transfer_seconds
from planner.cost.ticks import ticks
from planner.cost.workload import Workload
from planner.spec.cluster import Link
from planner.spec.layout import Layout
from planner.spec.profile import RecomputeMode
from planner.spec.recipes import ParameterCount

if TYPE_CHECKING:
    from planner.cost.pricing import LayerCost


@dataclass(frozen=True, slots=True)
class SharedCost:
    """Parameters used by several layers: stored once per stage, their gradients summed over the stages."""

    layers: tuple[int, ...]
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    host_optimizer_bytes: int
    """Where states are offloaded: in the host's memory, and none on the device."""
    tail_ticks: int
    """Reduction and optimizer of one copy, saved when a stage holds several layers that use it."""
    reduction_ticks: int
    """Of `tail_ticks`: the reduction."""
    exchange_ticks: int
    """All-reduce of the gradients over two stages, once per step and stage that holds a copy."""

    @property
    def ogp_bytes(self) -> int:
        """Of one copy."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class SkipCost:
    """A tensor that travels along every boundary between two layers."""

    producer: int
    consumer: int
    bytes: int
    """Per micro-batch."""


def shared_costs(
    work: Workload,
    layout: Layout,
    layers: Sequence[Mapping[RecomputeMode, LayerCost]],
    network: Link | None = None,
    gradient_bytes: int | None = None,
) -> tuple[SharedCost, ...]:
    """Parameters that several layers use, priced; a copy is split over tensor-parallel ranks if some user's is. Of one
    that is frozen nothing is summed or updated: equation (T8).

    Stages that hold copies exchange over `network`; None: over the slowest link that the layout's ranks cross.
    A rank keeps `gradient_bytes` for every element; None: its shard, as the recipe has it.
    """
    order, ogp = work.order, work.recipe
    crosses = layout.devices > work.domain_devices
    between = network or (
        work.inter_node if crosses and work.inter_node else work.intra_node
    )
    shards = [
        layout.zero_shards if layout.zero_stage >= level else 1 for level in (3, 2, 1)
    ]
    costs = []
    for one in work.profile.shared_parameters:
        users = tuple(sorted({order[name] for name in one.layers}))
        user = next(iter(layers[users[-1]].values()))
        least = min(next(iter(layers[layer].values())).parameters for layer in users)
        # A user that holds fewer elements than the parameter has holds a shard of it; else every rank has it whole.
        split = layout.tensor_parallel_degree if least < one.parameters else 1
        local = min(-(-one.parameters // split), user.parameters)
        # What layers share is no matrix of a hidden layer.
        count = ParameterCount(0 if one.frozen else local, 0, one.factored_elements)
        trained = 0 if one.frozen else local
        size_bytes = trained * ogp.gradient_bytes
        exchange = (
            2 * transfer_seconds(size_bytes / 2, between)
            if layout.pipeline_parallel_degree > 1
            else 0.0
        )
        states_bytes = ogp.optimizer_bytes(count) // shards[2]
        costs.append(
            SharedCost(
                layers=users,
                parameters_bytes=local * ogp.parameter_bytes // shards[0],
                gradients_bytes=size_bytes // shards[1]
                if gradient_bytes is None
                else trained * gradient_bytes,
                optimizer_bytes=0 if layout.optimizer_offload else states_bytes,
                host_optimizer_bytes=states_bytes if layout.optimizer_offload else 0,
                tail_ticks=(user.reduction_ticks + user.optimizer_ticks)
                * trained
                // max(1, user.trained),
                reduction_ticks=user.reduction_ticks * trained // max(1, user.trained),
                exchange_ticks=ticks(exchange),
            )
        )
    return tuple(costs)


def skip_costs(work: Workload, layout: Layout) -> tuple[SkipCost, ...]:
    """Tensors that skip layers, in bytes of this layout's micro-batches."""
    order, samples = work.order, layout.micro_batch_size
    return tuple(
        SkipCost(
            order[edge.from_],
            order[edge.to],
            edge.bytes_per_sample(work.job.sequence_length) * samples,
        )
        for edge in work.profile.edges
    )
