"""The costs of any layout: of ranks that are alike, or of ranks that differ."""

from __future__ import annotations

from planner.cost.layers import LayoutCosts, groups_of, priced
from planner.cost.mixed import mixed_costs
from planner.cost.workload import Workload
from planner.spec.layout import Layout


def layout_costs(work: Workload, layout: Layout) -> LayoutCosts:
    """Price every layer under a layout.

    Raises:
        LayoutError: the degrees do not multiply to the devices, the global batch does not divide, or ranks that
            exchange in every layer would stand in two node groups.
        MismatchError: the profile lacks this micro-batch size or tensor-parallel degree.
        UnsupportedError: the layout uses a dimension that is not priced.
    """
    if work.groups or layout.micro_batch_shares:
        return mixed_costs(work, layout)
    layout.check_devices(work.devices)
    return priced(work, layout, groups_of(layout, work.domain_devices))
