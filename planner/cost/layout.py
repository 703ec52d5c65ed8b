"""The costs of any layout: of ranks that are alike, or of ranks that differ."""

from __future__ import annotations

from planner.cost.groups import Groups, groups_of, has_two_copies
from planner.cost.layers import LayoutCosts, priced
from planner.cost.mixed import mixed_costs
from planner.cost.workload import Workload
from planner.spec.layout import Layout

_KEPT = 64
"""Layouts whose costs are kept: one after the other, callers ask for all orders of the same degrees."""


def layout_costs(work: Workload, layout: Layout) -> LayoutCosts:
    """Price every layer under a layout; those that agree in all but their order are priced once.

    Raises:
        LayoutError: the degrees do not multiply to the devices, the global batch does not divide, or ranks that
            exchange in every layer would stand in two node groups.
        MismatchError: the profile lacks this micro-batch size or tensor-parallel degree.
        UnsupportedError: the layout uses a dimension that is not priced, or offloads to a host that is not known.
    """
    if work.groups or len(set(layout.micro_batch_shares or ())) > 1:
        return mixed_costs(work, layout)
    key = _priced_alike(layout)
    if key in work.latest:
        known: LayoutCosts = work.latest[key]
        return known.under(layout)
    layout.check_devices(work.devices)
    found = priced(work, layout, _groups(work, layout))
    if len(work.latest) >= _KEPT:
        work.latest.clear()
    work.latest[key] = found
    return found


def _groups(work: Workload, layout: Layout) -> Groups:
    """The communicators; kept with the workload, since many layouts share their degrees."""
    key = (
        layout.data_parallel_degree,
        layout.tensor_parallel_degree,
        layout.pipeline_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
        layout.expert_tensor_parallel_degree,
        layout.zero_shard_degree,
        layout.rank_order,
        has_two_copies(layout),
    )
    if key not in work.communicators:
        work.communicators[key] = groups_of(layout, work.domain_devices)
    found: Groups = work.communicators[key]
    return found


def _priced_alike(layout: Layout) -> tuple[object, ...]:
    """Layouts that agree in this cost the same, but for their order and recomputation (`LayoutCosts.under`)."""
    return (
        layout.data_parallel_degree,
        layout.tensor_parallel_degree,
        layout.pipeline_parallel_degree,
        layout.context_parallel_degree,
        layout.expert_parallel_degree,
        layout.expert_tensor_parallel_degree,
        layout.zero_stage,
        layout.zero_shard_degree,
        layout.sequence_parallel,
        layout.micro_batch_size,
        layout.sequence_chunks,
        layout.rank_order,
        layout.activation_offload,
        layout.optimizer_offload,
        has_two_copies(layout),
    )
